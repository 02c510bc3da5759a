// Convert exception messages, which may contain any bytes, to valid UTF-8 for Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace opweave {

// Return the length in bytes of the character at `text[at]`, or 0 if it is invalid.
inline size_t character_size(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(at);
  if (first < 0x80) return 1;
  const size_t size = first < 0xc0 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf8 ? 4 : 0;
  if (size == 0 || at + size > text.size()) return 0;
  uint32_t code = first & (0x7f >> size);
  for (size_t i = at + 1; i < at + size; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xd800 && code < 0xe000;
  return code < kLeast[size] || code > 0x10ffff || is_surrogate ? 0 : size;
}

// Return the text with every invalid byte replaced by a question mark.
inline std::string valid_utf8(std::string text) {
  for (size_t at = 0; at < text.size();) {
    const size_t size = character_size(text, at);
    if (size == 0) text[at] = '?';
    at += size == 0 ? 1 : size;
  }
  return text;
}

}  // namespace opweave
