"use strict";
const numbers = JSON.parse(document.getElementById("numbers").textContent);

// The slider: every number at one t, and the cursor in the figures. Without scripts the page shows the even average.
function follow(section, curve) {
  const slider = section.querySelector(".slider");
  const input = slider.querySelector("input");
  const rows = section.querySelectorAll(".now tbody tr");
  const cursors = section.querySelectorAll("[id$='-cursor']");
  const show = () => {
    const at = Number(input.value);
    input.setAttribute("aria-valuetext", `t = ${curve.t[at]}`);
    section.querySelectorAll(".t").forEach((place) => { place.textContent = curve.t[at]; });
    curve.values[at].forEach((values, method) => {
      values.forEach((value, metric) => write(rows[method].cells[metric + 1], value));
    });
    cursors.forEach((cursor) => {
      const length = Number(cursor.closest("svg").dataset.length);
      cursor.setAttribute("visibility", "visible");
      cursor.setAttribute("transform", `translate(${curve.share[at] * length} 0)`);
    });
  };
  // Spoken when the slider comes to rest, not while it is dragged.
  const say = () => {
    const values = curve.values[Number(input.value)];
    const said = curve.methods.map((method, row) => `${method}: ${curve.metrics.map((metric, column) => `${metric} ${values[row][column]}`).join(", ")}`);
    slider.querySelector(".spoken").textContent = `${said.join(". ")}.`;
  };
  input.addEventListener("input", show);
  input.addEventListener("change", say);
  // The thumb stands under the cursor: the track is as long as the axis, and half a thumb longer at each end.
  const place = () => {
    const axis = [...section.querySelectorAll("svg[data-length]")].find((svg) => svg.getBoundingClientRect().width > 0);
    if (!axis) return;
    const percent = (length) => 100 * length / axis.viewBox.baseVal.width;
    input.style.marginLeft = `calc(${percent(axis.dataset.start)}% - 0.5rem)`;
    input.style.width = `calc(${percent(axis.dataset.length)}% + 1rem)`;
  };
  slider.hidden = false;
  addEventListener("resize", place);
  place();
  show();
}

// A cell that the slider changes sorts by its new value.
function write(cell, text) {
  cell.textContent = text;
  const value = parseFloat(text);
  if (Number.isNaN(value)) delete cell.dataset.value;
  else cell.dataset.value = value;
}

// Says where a table has columns beyond the edge; without scripts, its shade does.
function hint(table) {
  const scroll = table.querySelector(".scroll");
  const more = () => table.classList.toggle("overflows", scroll.scrollWidth > scroll.clientWidth + 1);
  new ResizeObserver(more).observe(scroll);
  more();
}

// Numbers before words, and cells without a value last, whichever way the column is sorted.
function compare(left, right, direction) {
  const values = [left, right].map((cell) => ("value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent));
  const empty = values.map((value) => value === "" || Number.isNaN(value));
  if (empty[0] || empty[1]) return empty[0] - empty[1];
  if (typeof values[0] !== typeof values[1]) return typeof values[0] === "number" ? -1 : 1;
  const order = typeof values[0] === "number" ? Math.sign(values[0] - values[1]) || 0 : values[0].localeCompare(values[1], "en", { numeric: true });
  return direction * order;
}

function sort(header) {
  const ascending = header.getAttribute("aria-sort") !== "ascending";
  const body = header.closest("table").tBodies[0];
  const rows = [...body.rows].sort((left, right) => compare(left.cells[header.cellIndex], right.cells[header.cellIndex], ascending ? 1 : -1));
  body.append(...rows);
  header.parentNode.querySelectorAll("th").forEach((other) => other.setAttribute("aria-sort", "none"));
  header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
}

document.querySelectorAll("[data-curve]").forEach((section) => follow(section, numbers[section.dataset.curve]));
document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => sort(button.closest("th"))));
document.querySelectorAll(".wide").forEach(hint);
