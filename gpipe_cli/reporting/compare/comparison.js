"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const table = document.querySelector("table"), body = table.tBodies[0];
const rows = [...body.rows];  // in the order of data.runs, however they are sorted
const charts = [];
const hiddenRuns = new Set();

// The table. Rows are sorted by the value itself, not by how it is written; what a run does not have comes last either
// way.
const heads = [...table.tHead.rows[0].cells].filter(head => !head.classList.contains("plain"));

function sort(head) {
  const up = head.getAttribute("aria-sort") !== "ascending";
  heads.forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = row => row.cells[head.cellIndex].dataset.value;
  body.append(...[...body.rows].sort((a, b) => {
    const x = value(a), y = value(b);
    if (x === y) return 0;
    if (x === "" || y === "") return x === "" ? 1 : -1;
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, {numeric: true}) : x - y;
    return up ? order : -order;
  }));
}

for (const head of heads) {
  head.tabIndex = 0;
  head.addEventListener("click", () => sort(head));
  head.addEventListener("keydown", event => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    sort(head);
  });
}

// A bar behind each number of the columns that people compare.
for (const column of data.bars) {
  const cells = rows.map(row => row.cells[column]).filter(cell => cell.dataset.value !== "");
  const most = Math.max(...cells.map(cell => Number(cell.dataset.value)));
  for (const cell of most > 0 ? cells : []) {
    cell.classList.add("bar");
    cell.style.setProperty("--share", Number(cell.dataset.value) / most);
  }
}

// Where the table is wider than the window, runs stand side by side and every column becomes a row, if that fits.
const wide = table.parentNode, scrolled = document.getElementById("scrolled");
const tooWide = () => wide.scrollWidth > wide.clientWidth;
let widthBefore = 0;

function turn() {
  if (wide.clientWidth === widthBefore) return;
  widthBefore = wide.clientWidth;
  table.classList.remove("turned");
  if (tooWide()) table.classList.add("turned");
  if (tooWide()) table.classList.remove("turned");
  scrolled.hidden = !tooWide();
}

// Lines of a heading are one where breaks are hidden: "memory MiB", "samples/s", "hardware.link_gb_per_second".
for (const head of table.tHead.rows[0].cells) {
  const lines = head.textContent.split("\n");
  head.replaceChildren(...lines.flatMap((line, at) => {
    const text = at + 1 < lines.length && !/[-._]$/.test(line) && lines[at + 1][0] !== "/" ? `${line} ` : line;
    return at ? [document.createElement("br"), text] : [text];
  }));
}

table.style.setProperty("--columns", table.tHead.rows[0].cells.length);
new ResizeObserver(turn).observe(wide);
turn();

// Runs are shown and hidden in all charts at once.
const chips = document.getElementById("chips");
const chipOf = data.runs.map((run, number) => {
  const chip = document.createElement("button"), mark = document.createElement("i");
  chip.type = "button";
  chip.className = "chip";
  mark.style.background = run.colour;
  chip.append(mark, run.label);
  chip.setAttribute("aria-pressed", "true");
  chip.title = "a click hides or shows it, a double click shows it alone";
  chip.addEventListener("click", () => show(number, hiddenRuns.has(number)));
  chip.addEventListener("dblclick", () => data.runs.forEach((_, other) => show(other, other === number)));
  chip.addEventListener("pointerenter", () => light(number));
  chip.addEventListener("pointerleave", () => light(null));
  return chip;
});
if (data.curves.length) {
  const all = document.createElement("button");
  all.type = "button";
  all.textContent = "all";
  all.addEventListener("click", () => data.runs.forEach((_, number) => show(number, true)));
  chips.append(...chipOf, all);
}

function show(number, shown) {
  if (shown) hiddenRuns.delete(number); else hiddenRuns.add(number);
  chipOf[number].setAttribute("aria-pressed", String(shown));
  rows[number].classList.toggle("off", !shown);
  for (const {plot, runs} of charts) {
    runs.forEach((run, at) => { if (run === number) plot.setSeries(at + 1, {show: shown}); });
  }
}

function light(number) {
  rows.forEach((row, other) => row.classList.toggle("lit", other === number));
  for (const {plot, runs} of charts) {
    const at = number === null ? -1 : runs.indexOf(number);
    if (number === null) plot.setSeries(null, {focus: true}, false);
    else if (at >= 0) plot.setSeries(at + 1, {focus: true}, false);
  }
}

rows.forEach((row, number) => {
  row.addEventListener("pointerenter", () => light(number));
  row.addEventListener("pointerleave", () => light(null));
});

// The charts. Of each curve there are the points that it has; charts take them with a place for all steps.
for (const chart of data.curves) {
  for (const line of chart.lines) {
    const values = chart.x.map(() => null);
    line.at.forEach((place, n) => { values[place] = line.values[n]; });
    line.values = values;
  }
}

const tip = document.getElementById("tip");
const colour = name => getComputedStyle(root).getPropertyValue(name).trim();
const sync = uPlot.sync("steps");

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return value.toLocaleString("en", {maximumFractionDigits: size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 3 : 4});
}

function written(chart, value) {
  return chart.percent ? `${short(100 * value)} %` : short(value);
}

// Beside a chart whose lines are no runs: which line is what.
function named(line) {
  const entry = document.createElement("span"), mark = document.createElement("i");
  entry.className = "named";
  mark.style.borderColor = line.colour ?? "var(--pale)";
  mark.style.borderTopStyle = line.dash.length ? "dashed" : "solid";
  entry.append(mark, line.label);
  return entry;
}

function draw(chart, holder, options) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  const title = document.createElement("b"), note = document.createElement("span");
  title.textContent = chart.title;
  note.textContent = chart.note;
  note.className = "pale";
  caption.append(title, note, ...(options.named ? chart.lines.map(named) : []));
  const place = document.createElement("div");
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", `${chart.title}: ${chart.lines.map(line => `${line.label} ends at `
    + written(chart, line.values.findLast(value => value !== null) ?? NaN)).join("; ")}`);
  figure.append(caption, place);
  holder.append(figure);
  const axis = {stroke: () => colour("--pale"), grid: {stroke: () => colour("--rule"), width: 1},
    ticks: {show: false}, font: "12px system-ui, sans-serif"};
  const plot = new uPlot({
    width: Math.max(240, figure.clientWidth), height: 250,
    legend: {show: false},
    focus: {alpha: 0.2},
    cursor: {focus: {prox: 24}, points: {size: 7}, ...options.cursor},
    scales: {x: {time: false, ...options.x}, y: {distr: chart.logarithmic ? 3 : 1, range: options.range}},
    axes: [
      {...axis, size: 30, ...options.axis},
      {...axis, size: 62, values: (_, splits) => splits.map(value => value === null ? "" : written(chart, value))},
    ],
    series: [{}, ...chart.lines.map(line => ({
      label: line.label, stroke: line.colour ?? (() => colour("--pale")), width: line.width, dash: line.dash,
      spanGaps: true, points: {show: line.points, size: 6, fill: line.colour},
    }))],
    hooks: {setCursor: [own => tell(chart, own, options.unit)], ready: [own => {
      own.over.addEventListener("pointerleave", () => { tip.hidden = true; });
    }]},
  }, [chart.x, ...chart.lines.map(line => line.values)], place);
  new ResizeObserver(() => plot.setSize({width: Math.max(240, figure.clientWidth), height: 250})).observe(figure);
  charts.push({plot, runs: chart.lines.map(line => line.run)});
}

// What stands at the cursor: the value of every run that is shown, the largest first. A run without a point there has
// that of the last one before.
function tell(chart, plot, unit) {
  const {idx, left, top} = plot.cursor;
  if (!plot.over.matches(":hover")) return;
  if (idx === null || idx === undefined || left < 0) { tip.hidden = true; return; }
  const found = [];
  chart.lines.forEach((line, at) => {
    let point = idx;
    while (point > 0 && line.values[point] === null) point -= 1;
    const value = line.values[point];
    if (plot.series[at + 1].show && value !== null) found.push({line, value, from: point});
  });
  found.sort((a, b) => b.value - a.value);
  const head = document.createElement("b");
  head.textContent = `${unit} ${chart.x[idx].toLocaleString("en")}`;
  tip.replaceChildren(head, ...found.slice(0, 16).map(({line, value, from}) => {
    const entry = document.createElement("div"), name = document.createElement("span");
    const mark = document.createElement("i"), number = document.createElement("span");
    mark.style.background = line.colour?.slice(0, 7) ?? colour("--pale");  // without transparency
    name.append(mark, line.label);
    number.textContent = written(chart, value);
    if (from !== idx) entry.className = "far";
    entry.append(name, number);
    return entry;
  }));
  tip.hidden = false;
  const box = plot.over.getBoundingClientRect();
  const x = box.left + left + 16, y = box.top + top + 16;
  tip.style.left = `${Math.max(4, x + tip.offsetWidth > innerWidth - 4 ? x - tip.offsetWidth - 32 : x)}px`;
  tip.style.top = `${Math.max(4, Math.min(y, innerHeight - tip.offsetHeight - 4))}px`;
}

// A share is at most 1.
function withinAll(_, low, high) {
  const margin = Math.max(0.02, (high - low) / 10);
  return [Math.max(0, low - margin), Math.min(1, high + margin)];
}

for (const chart of data.scaling) {
  draw(chart, document.getElementById("scaling"), {
    named: true,
    unit: data.scaling_unit,
    cursor: {drag: {x: false, y: false}},
    x: {distr: 3, log: 2, range: [chart.x[0] / 1.15, chart.x[chart.x.length - 1] * 1.15]},
    axis: {splits: () => chart.x, values: (_, splits) => splits.map(String), filter: (_, splits) => splits},
    range: (_, low, high) => [0, high * 1.1],
  });
}
for (const chart of data.curves) {
  draw(chart, document.getElementById("curves"), {
    unit: "step",
    cursor: {sync: {key: sync.key, scales: ["x", null]}},
    axis: {},
    range: chart.percent ? withinAll : undefined,
  });
}

startTheme(() => charts.forEach(({plot}) => plot.redraw(false, true)));
})();
