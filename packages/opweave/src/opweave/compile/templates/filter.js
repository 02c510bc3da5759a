"use strict";
// Shows the rows that match every filter of their table.
for (const box of document.querySelectorAll(".filtered")) {
  const form = box.querySelector("form"), count = form.querySelector("output");
  const rows = [...box.querySelectorAll("tbody tr")];
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const total = rows.reduce((sum, row) => sum + Number(row.dataset.calls), 0);
  const apply = () => {
    const { op, provider, text } = form.elements;
    const words = text.value.toLowerCase().split(/\s+/);
    let shown = 0;
    rows.forEach((row, i) => {
      const matches = (!op.value || row.dataset.op === op.value)
        && (!provider.value || row.dataset.provider === provider.value)
        && words.every((word) => texts[i].includes(word));
      row.hidden = !matches;
      shown += matches * row.dataset.calls;
    });
    count.value = `${shown} of ${total} calls`;
  };
  form.addEventListener("input", apply);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  apply();
}
// A link to a graph that is folded unfolds it.
const unfold = () => {
  const target = document.getElementById(location.hash.slice(1));
  if (target instanceof HTMLDetailsElement) target.open = true;
};
addEventListener("hashchange", unfold);
unfold();
