// Ops with every kind of argument and result.
#include <opweave/extension.h>

#include <new>
#include <stdexcept>
#include <string>

using namespace opweave;

namespace {

constexpr int64_t kAbsent = -1000;

double sum(IntList list) {
  double total = 0;
  for (int64_t value : list) total += static_cast<double>(value);
  return total;
}

// Writes what it was given into out, so that it works in a graph as well.
void write_all(const View& out, const View* x, int64_t i, double f, bool b, IntList list,
               std::optional<int64_t> oi, std::optional<double> of, std::optional<bool> ob,
               std::optional<IntList> ol) {
  check_dtype(out, {OPWEAVE_FLOAT64});
  check_contiguous(out);
  auto* to = reinterpret_cast<double*>(out.data);
  to[0] = x != nullptr ? static_cast<double>(x->element_count()) : kAbsent;
  to[1] = static_cast<double>(i);
  to[2] = f;
  to[3] = b;
  to[4] = static_cast<double>(list.size());
  to[5] = sum(list);
  to[6] = static_cast<double>(oi.value_or(kAbsent));
  to[7] = of.value_or(kAbsent);
  to[8] = ob.has_value() ? *ob : kAbsent;
  to[9] = ol.has_value() ? sum(*ol) + static_cast<double>(ol->size()) : kAbsent;
}

int64_t give_int(const View&, int64_t i) { return i; }
double give_float(const View&, double f) { return f; }
bool give_bool(const View&, bool b) { return b; }

std::tuple<int64_t, double, bool> give_several(const View& x, IntList list,
                                               std::optional<double> f) {
  return {x.element_count(), sum(list) + f.value_or(0.5), list.empty()};
}

std::string repeated(const char* text, int times) {
  std::string all;
  while (times-- > 0) all += text;
  return all;
}

void fail(const View&, IntList list, std::optional<int64_t> kind) {
  check(!list.empty(), "list must not be empty");
  if (kind == 1) throw std::bad_alloc();
  if (kind == 2) throw 2;
  if (kind == 3) throw std::runtime_error("d\xe9j\xe0 vu");  // not UTF-8
  if (kind == 4) throw std::runtime_error("!" + repeated("\xc3\xa9", 3000));
}

void check_apart(const View& left, const View& right) { check_disjoint(left, right); }

void count(const View& out, const View& x) {
  check_dtype(out, {OPWEAVE_INT64});
  *reinterpret_cast<int64_t*>(out.data) = x.element_count();
}

// Throws in the loop, from `first` on.
void fail_in_loop(const View& x, int64_t first) {
  for_rows(x.element_count(), int64_t{1} << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) check(i < first, "a row is bad");
  });
}

// Reports what parse_schema says about one of these.
const char* const kBadSchemas[] = {
    "f",
    "f(Tensor x)",
    "f(Tensor x) x -> ()",
    "f -> ()",
    "f(Tensor x) -> Tensor",
    "f(Tensor x) -> (int, Tensor)",
    "f(int x) -> ()",
    "f(Tensor? x) -> ()",
    "f() -> ()",
    "f(Tensor x, str s) -> ()",
    "f(Tensor x, int[2] s) -> ()",
    "f(Tensor x, Tensor[] s) -> ()",
    "f(Tensor x, *, int i) -> ()",
    "f(Tensor x, int i=1) -> ()",
    "f(Tensor x, int) -> ()",
    "f(Tensor x, int x) -> ()",
    "f(Tensor x, int(a!) i) -> ()",
    "f(Tensor(a) x) -> ()",
    "f(Tensor(a! x) -> ()",
    "f(Tensor x,) -> ()",
    "_f(Tensor x) -> ()",
    "f.out(Tensor x) -> ()",
    "3(Tensor x) -> ()",
    "f(Tensor 3) -> ()",
};

void try_schema(const View&, int64_t i) {
  check(i >= 0 && i < static_cast<int64_t>(std::size(kBadSchemas)), "past the end");
  parse_schema(kBadSchemas[i]);
}

}  // namespace

OPWEAVE_EXTENSION_MODULE(m) {
  m.def(
      "write_all(Tensor(a!) out, Tensor? x, int i, float f, bool b, int[] list, int? oi, "
      "float? of, bool? ob, int[]? ol) -> ()",
      write_all);
  m.def("give_int(Tensor x, int i) -> int", give_int);
  m.def("give_float(Tensor x, float f) -> (float)", give_float);
}

// A second block in one file, as in several files.
OPWEAVE_EXTENSION_MODULE(m) {
  m.def("give_bool(Tensor x, bool b) -> bool", give_bool);
  m.def("give_several(Tensor x, int[] list, float? f) -> (int count, float sum, bool is_empty)",
        give_several);
  m.def("fail(Tensor x, int[] list, int? kind) -> ()", fail);
  m.def("count(Tensor(a!) out, Tensor x) -> ()", count);
  m.def("fail_in_loop(Tensor x, int first) -> ()", fail_in_loop);
  m.def("check_disjoint(Tensor(a!) left, Tensor right) -> ()", check_apart);
  m.def("try_schema(Tensor x, int i) -> ()", try_schema);
}
