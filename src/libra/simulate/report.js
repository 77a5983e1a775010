// Brings the report to life.  Bundled with Vega, Vega-Lite and Vega-Embed, as `vegaEmbed`.
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const read = (id) => JSON.parse(document.getElementById(id).textContent);
document.documentElement.classList.add("js");

// Charts.  With `ast`, Vega interprets its expressions: the page's policy forbids compiling them.
const charts = read("charts");
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

// Copying the recommended line, and saving the study.
const copy = document.getElementById("copy");
copy?.addEventListener("click", async () => {
  const line = document.getElementById("line");
  let copied = true;
  try {
    await navigator.clipboard.writeText(line.textContent);
  } catch {  // no permission: select the line, and try the old command
    getSelection().selectAllChildren(line);
    copied = document.execCommand("copy");
  }
  copy.textContent = copied ? "Copied" : "Press Ctrl+C";
  setTimeout(() => { copy.textContent = "Copy"; }, 2500);
});
document.getElementById("save").addEventListener("click", () => {
  const text = document.getElementById("study").textContent;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "study.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});

// Sorting the candidates by a column: numbers by their value.
const heads = all("#table thead button");
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
