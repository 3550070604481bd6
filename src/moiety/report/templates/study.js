"use strict";
(() => {
  // -- plots -----------------------------------------------------------------------------------
  const block = document.getElementById("figures");
  const figures = block ? JSON.parse(block.textContent) : {};
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const printed = matchMedia("print");
  const touched = matchMedia("(pointer: coarse)").matches;
  const PAPER = 680; // pixels that fit between the margins of A4 and of letter paper

  // Colours are names of the style sheet: "--c0", or "--c0/2e" with two digits of opacity.
  function painted(value, key, style) {
    if (Array.isArray(value)) return value.map((each) => painted(each, key, style));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, painted(v, k, style)]));
    if (typeof value !== "string" || !/color(scale)?$/.test(key) || !value.startsWith("--")) return value;
    const [name, opacity = ""] = value.split("/");
    return style.getPropertyValue(name).trim() + opacity;
  }

  function framed(layout, width) {
    const axis = {
      gridcolor: "--grid", zerolinecolor: "--quiet", linecolor: "--line", zeroline: false,
      automargin: true, fixedrange: touched, tickfont: { color: "--quiet" }, title: { standoff: 10 },
    };
    const merged = (mine) => ({ ...axis, ...mine, title: { ...axis.title, ...mine.title } });
    return {
      ...layout,
      xaxis: merged(layout.xaxis), yaxis: merged(layout.yaxis), width, autosize: !width,
      margin: { l: 10, r: 10, t: 10, b: 10 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "--ink" },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemwidth: 36 },
      hoverlabel: { bgcolor: "--code", bordercolor: "--quiet", font: { color: "--ink" } },
      dragmode: touched ? false : "zoom", // a finger scrolls the page
    };
  }

  function draw() {
    const style = getComputedStyle(root);
    const width = printed.matches ? PAPER : undefined;
    for (const [id, { data, layout }] of Object.entries(figures)) {
      Plotly.react(id, painted(data, "", style), painted(framed(layout, width), "", style),
        { displayModeBar: false, responsive: !width });
    }
  }
  if (block) {
    draw();
    for (const media of [dark, printed]) media.addEventListener("change", draw);
  }

  // -- sorting ---------------------------------------------------------------------------------
  function sort(head) {
    const now = head.getAttribute("aria-sort");
    const order = now ? (now === "ascending" ? "descending" : "ascending") : head.dataset.first;
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
    const body = head.closest("table").tBodies[0];
    const value = (row) => row.cells[head.cellIndex].dataset.value;
    const known = [...body.rows].filter((row) => value(row) !== "");
    const unknown = [...body.rows].filter((row) => value(row) === "");
    const text = head.cellIndex === 0;
    const compare = (a, b) => (text ? value(a).localeCompare(value(b)) : value(a) - value(b));
    known.sort((a, b) => (order === "ascending" ? compare(a, b) : compare(b, a)));
    body.append(...known, ...unknown); // what has no number stays last
  }
  for (const button of document.querySelectorAll(".sortable th button"))
    button.addEventListener("click", () => sort(button.closest("th")));

  // -- the command -----------------------------------------------------------------------------
  const copy = document.getElementById("copy");
  const code = document.querySelector(".command code");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "Copied";
      copy.nextElementSibling.textContent = "The command was copied";
    } catch { // a browser may refuse; then it is at least selected
      getSelection().selectAllChildren(code);
    }
  });
})();
