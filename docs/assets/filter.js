/* A field above every long table: rows that do not have all its words are hidden. */
"use strict";
const LONG = 8; // rows

function addFilter(table) {
  const rows = [...table.tBodies[0].rows];
  const field = document.createElement("input");
  field.type = "search";
  field.className = "table-filter";
  field.placeholder = `Filter ${rows.length} rows, for example: rotary causal-lm`;
  field.setAttribute("aria-label", "Filter the rows of the table below");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  const scroller = table.closest(".md-typeset__scrollwrap") || table;
  scroller.parentNode.insertBefore(field, scroller);
}

document.addEventListener("DOMContentLoaded", () => {
  if (!location.pathname.endsWith("architectures.html")) return;
  document.querySelectorAll("article table").forEach((table) => {
    if (table.tBodies[0] && table.tBodies[0].rows.length >= LONG) addFilter(table);
  });
});
