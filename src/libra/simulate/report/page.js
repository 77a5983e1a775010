"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const make = (name, words) => {
    const made = document.createElement(name);
    if (words !== undefined) made.textContent = words;
    return made;
  };
  document.documentElement.classList.add("js");

  // Copying and saving.
  const line = document.getElementById("line");
  const copy = document.getElementById("copy");
  const select = () => {
    const range = document.createRange();
    range.selectNodeContents(line);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
  };
  if (copy) {
    copy.setAttribute("aria-live", "polite");
    copy.addEventListener("click", async () => {
      let copied = true;
      try {
        await navigator.clipboard.writeText(line.textContent);
      } catch {
        select();  // at least it is marked, to copy by hand
        copied = document.execCommand("copy");
      }
      copy.textContent = copied ? "Copied" : "Press Ctrl+C";
      setTimeout(() => { copy.textContent = "Copy"; }, 2500);
    });
  }
  document.getElementById("save").addEventListener("click", () => {
    const text = document.getElementById("simulation").textContent;
    const link = make("a");
    link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    link.download = "simulation.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  // Sorting: numbers by their value, missing ones last.
  for (const table of all("table.sortable")) {
    const heads = all("thead th", table);
    const body = table.tBodies[0];
    heads.forEach((head, column) => {
      const button = make("button", head.textContent);
      button.type = "button";
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const sign = down ? -1 : 1;
        const rows = [...body.rows].map((row) => {
          const cell = row.cells[column];
          const value = cell.dataset.v;
          return { row, missing: value === "", key: value === undefined ? cell.textContent : Number(value) };
        });
        rows.sort((a, b) => a.missing - b.missing || sign * (a.key < b.key ? -1 : a.key > b.key ? 1 : 0));
        body.append(...rows.map((entry) => entry.row));
      });
    });
  }

  // Figures: legend, scale, tooltips.
  const anchorsOf = (figure, svg) => {
    const view = svg.querySelector("g.v:not(.off)");
    const mode = svg.dataset.mode;
    return (view.dataset.a || "").split(";").filter(Boolean).map((entry) => {
      const [row, a, b, series] = entry.split(",");
      return mode === "y" ? { row: +row, x: null, y: +a } : { row: +row, x: +a, y: b === undefined ? null : +b, series };
    }).filter((anchor) => !figure.hiddenSeries.has(anchor.series));
  };

  for (const element of all("figure")) {
    const plot = element.querySelector(".plot");
    if (!plot) continue;
    const figure = { hiddenSeries: new Set(), at: -1 };
    const table = element.querySelector("table.data");
    const tip = plot.querySelector(".tip");
    const say = plot.querySelector(".say");
    const heads = table ? all("thead th", table).map((cell) => cell.textContent) : [];
    const shownSvg = () => all("svg.plot-svg", plot).find((svg) => svg.getClientRects().length > 0);

    const hide = () => {
      tip.hidden = true;
      figure.at = -1;
      for (const cursor of all(".cur", plot)) cursor.classList.add("off");
    };
    const show = (svg, anchor, aloud) => {
      const row = table && table.tBodies[0].rows[anchor.row];
      if (!row) return;
      const cells = [...row.cells].map((cell) => cell.textContent);
      tip.replaceChildren(make("b", `${heads[0]}: ${cells[0]}`));
      for (let i = 1; i < cells.length; i += 1) {
        const pair = make("div");
        pair.append(make("span", heads[i]), make("span", cells[i]));
        tip.append(pair);
      }
      const box = svg.viewBox.baseVal;
      const seen = svg.getBoundingClientRect();
      const frame = plot.getBoundingClientRect();
      const zoom = seen.width / box.width;
      const x = seen.left - frame.left + (anchor.x === null ? box.width / 2 : anchor.x) * zoom;
      const y = seen.top - frame.top + (anchor.y === null ? 30 : anchor.y) * zoom;
      tip.hidden = false;
      const right = x + 16 + tip.offsetWidth <= frame.width;
      const left = right ? x + 16 : Math.max(x - 16 - tip.offsetWidth, 0);
      tip.style.left = `${Math.min(left, Math.max(frame.width - tip.offsetWidth, 0))}px`;
      tip.style.top = `${svg.dataset.mode === "y" ? y + 16 * zoom : Math.max(y - 20, 0)}px`;
      const cursor = svg.querySelector(".cur");
      if (cursor) {
        cursor.classList.remove("off");
        const places = cursor.tagName === "circle" ? { cx: anchor.x, cy: anchor.y } : { x1: anchor.x, x2: anchor.x };
        for (const [name, value] of Object.entries(places)) cursor.setAttribute(name, value);
      }
      if (aloud) say.textContent = cells.map((cell, i) => `${heads[i]} ${cell}`).join(", ");
    };
    const nearest = (svg, event) => {
      const matrix = svg.getScreenCTM();
      if (!matrix) return null;
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
      const mode = svg.dataset.mode;
      let best = null;
      let least = mode === "xy" ? 40 : Infinity;
      for (const anchor of anchorsOf(figure, svg)) {
        const dx = anchor.x === null ? 0 : anchor.x - point.x;
        const dy = anchor.y === null ? 0 : anchor.y - point.y;
        const distance = Math.hypot(dx, dy);
        if (distance < least) [best, least] = [anchor, distance];
      }
      return best;
    };
    const follow = (event) => {
      const svg = shownSvg();
      const anchor = svg && nearest(svg, event);
      if (anchor) show(svg, anchor, false); else hide();
    };
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);

    // One stop of the Tab key; arrows walk along the values.
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", `${element.querySelector("h3").textContent}: arrow keys read the values`);
    plot.addEventListener("keydown", (event) => {
      const svg = shownSvg();
      const anchors = svg ? anchorsOf(figure, svg).sort((a, b) => a.row - b.row) : [];
      const last = anchors.length - 1;
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10, PageUp: -10 };
      let to;
      if (event.key === "Escape") { hide(); return; }
      if (event.key === "Home") to = 0;
      else if (event.key === "End") to = last;
      else if (event.key in steps) to = figure.at < 0 ? 0 : figure.at + steps[event.key];
      else return;
      event.preventDefault();
      if (last < 0) return;
      figure.at = Math.min(Math.max(to, 0), last);
      show(svg, anchors[figure.at], true);
    });

    for (const entry of all(".legend [data-series]", element)) {
      const button = make("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(...entry.childNodes);
      entry.append(button);
      button.addEventListener("click", () => {
        const key = entry.dataset.series;
        const off = !figure.hiddenSeries.has(key);
        if (off) figure.hiddenSeries.add(key); else figure.hiddenSeries.delete(key);
        button.setAttribute("aria-pressed", String(!off));
        for (const group of all("[data-s]", plot)) if (group.dataset.s === key) group.classList.toggle("gone", off);
        hide();
      });
    }
    const scales = all("[data-scale]", element);
    for (const button of scales) {
      button.addEventListener("click", () => {
        for (const other of scales) other.setAttribute("aria-pressed", String(other === button));
        for (const view of all("g.v", plot)) view.classList.toggle("off", view.dataset.v !== button.dataset.scale);
        hide();
      });
    }
  }
})();
