// Brings the report to life.  Bundled with Vega, Vega-Lite and Vega-Embed, as `vegaEmbed`.
document.documentElement.classList.add("js");

// Charts.  With `ast`, Vega interprets its expressions: the page's policy forbids compiling them.
const charts = JSON.parse(document.getElementById("charts").textContent);
const draw = () => Object.entries(charts).forEach(async ([key, spec]) => {
  const box = document.querySelector(`#${key} .chart`);
  spec.width = box.clientWidth;
  spec.config.font = getComputedStyle(document.body).fontFamily;
  const tooltip = { disableDefaultStyle: true, offsetX: 14, offsetY: 14 };
  const options = { mode: "vega-lite", renderer: "svg", ast: true, actions: false, defaultStyle: false, tooltip };
  const { view } = await vegaEmbed(box, spec, options);
  view.resize().runAsync();  // once more: the rows of the legend follow from the width
});
draw();
let drawn = innerWidth;
addEventListener("resize", () => { if (innerWidth !== drawn) { drawn = innerWidth; draw(); } });

// Copying the recommended line.
const copy = document.getElementById("copy");
copy?.addEventListener("click", () => {
  getSelection().selectAllChildren(document.getElementById("line"));
  copy.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
});

// Sorting the candidates by a column: numbers by their value.
const heads = [...document.querySelectorAll("#table thead button")];
heads.forEach((head, column) => head.addEventListener("click", () => {
  const cell = head.parentElement;
  const sign = cell.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  heads.forEach((other) => other.parentElement.removeAttribute("aria-sort"));
  cell.setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  const value = (row) => row.cells[column].dataset.v;
  const order = (a, b) => sign * (value(a) - value(b) || value(a).localeCompare(value(b)));
  const body = document.querySelector("#table tbody");
  body.append(...[...body.rows].sort(order));
}));
