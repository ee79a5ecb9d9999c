"use strict";

// Sort a table by a column: numbers before words, cells without a value last in either order.
for (const table of document.querySelectorAll("table.sortable")) {
  const titles = [...table.tHead.rows[0].cells];
  titles.forEach((title, column) => title.querySelector("button").addEventListener("click", () => {
    const descending = title.getAttribute("aria-sort") === "ascending";
    titles.forEach((other) => other.setAttribute("aria-sort", "none"));
    title.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const rows = [...table.tBodies[0].rows].map((row) => ({ row, order: row.cells[column].dataset.order }));
    rows.sort((a, b) => compare(a.order, b.order, descending ? -1 : 1));
    table.tBodies[0].append(...rows.map(({ row }) => row));
  }));
}

function compare(a, b, sign) {
  if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
  const [x, y] = [a, b].map((text) => (text === "inf" ? Infinity : Number(text)));
  if (Number.isNaN(x) || Number.isNaN(y)) return sign * a.localeCompare(b);
  return x === y ? 0 : sign * (x < y ? -1 : 1);
}

// Hide or show one run in all figures.
for (const chip of document.querySelectorAll(".chip")) {
  chip.addEventListener("click", () => {
    const shown = chip.getAttribute("aria-pressed") === "true";
    chip.setAttribute("aria-pressed", String(!shown));
    for (const drawn of document.querySelectorAll(`.chart .run-${chip.dataset.run}`)) drawn.classList.toggle("gone", shown);
  });
}
