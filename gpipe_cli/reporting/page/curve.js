// The curve of `gpipe plan solve=memory_time`: memory against time of a step, and a way from each point to its lanes and
// its command. What a screen reader and the keyboard get is the list of its points; the picture is of the same.
const CURVE = {height: 220, left: 62, right: 30, top: 8, bottom: 38};

function startCurve() {
  if (!data.curve) return;
  field("curve").hidden = false;
  const front = byMemory(point => !point.dominated), others = byMemory(point => point.dominated);
  const bound = data.curve.lower_bound_seconds, fastest = front.at(-1).step_seconds;
  field("curve-text").textContent = `Of ${data.curve.points.length} settings, no other one is faster with as little ` +
    `memory than these ${front.length}, joined by a line. No step can be shorter than ${duration(bound)}; the fastest takes ` +
    `${duration(fastest)}, ${difference(fastest, bound, "less", "more", "as much")}. Choose a point: its lanes are shown ` +
    "below, and the command that runs it.";
  listPoints("front", front);
  listPoints("dominated", others);
  field("others").hidden = !others.length;
  field("copy").addEventListener("click", copyCommand);
}

// Some of the points, from the least memory on.
function byMemory(wanted) {
  return data.curve.points.filter(wanted)
    .sort((one, other) => one.memory_bytes - other.memory_bytes || other.step_seconds - one.step_seconds);
}

function listPoints(id, points) {
  for (const point of points) {
    const link = field(id).appendChild(document.createElement("li")).appendChild(document.createElement("a"));
    link.textContent = pointInWords(point);
    link.href = `#${addressOf(controlsOf(point))}`;
    link.point = point;
    link.addEventListener("click", event => {
      event.preventDefault();
      choosePoint(point);
    });
  }
}

function pointInWords({setting, step_seconds, memory_bytes}) {
  const {partitions, micro_batches, schedule, placement, recompute, stages_per_process} = setting;
  const placed = stages_per_process > 1 ? ` (${placement})` : "";
  return `${size(memory_bytes)}, ${duration(step_seconds)}: ${schedule}${placed}, K = ${partitions}, ` +
    `M = ${micro_batches}, recompute ${recompute}`;
}

// The controls that simulate a point.
function controlsOf({setting}) {
  const controls = {...state.own, ...setting};
  if (!explored(controls) && String(controls.balance) === String(data.balance)) controls.balance = undefined;
  return withDevices(controls);
}

function choosePoint(point) {
  const controls = controlsOf(point);
  if (gpipe.configured(data, controls).timeline) {
    state.history.push(state.controls);
    setControls(controls);
  } else { // an order that was searched for, and is not kept here
    markPoint(point);
    explained.textContent = "The lanes of this point are not in this page: its command draws them.";
  }
  live.textContent = explained.textContent;
}

// The point whose setting the controls are, if there is one.
function pointOfControls() {
  const here = addressOf(state.controls);
  return data.curve.points.find(point => addressOf(controlsOf(point)) === here);
}

async function copyCommand() {
  const text = field("chosen-command");
  try {
    await navigator.clipboard.writeText(text.textContent);
    live.textContent = "copied";
  } catch { // not allowed in every page that is a file
    getSelection().selectAllChildren(text);
  }
}

function showCurve() {
  if (data.curve) markPoint(pointOfControls());
}

function markPoint(now) {
  for (const link of field("curve").querySelectorAll("a")) {
    link.setAttribute("aria-current", link.point === now);
  }
  field("chosen").hidden = !now;
  field("chosen-command").textContent = now?.command ?? "";
  drawCurve(now);
}

function drawCurve(now) {
  const {points, lower_bound_seconds: bound, limit_bytes: limit} = data.curve, {height, left, right, top, bottom} = CURVE;
  const picture = field("curve-picture"), width = Math.max(260, picture.parentNode.clientWidth);
  const bytes = points.map(point => point.memory_bytes), most = Math.max(...bytes);
  const shown = limit && limit < 1.3 * most ? [limit] : [], longest = Math.max(...points.map(point => point.step_seconds));
  const x = scale([...bytes, ...shown], left, width - right), y = scale([bound, longest], height - bottom, top);
  picture.replaceChildren();
  picture.setAttribute("width", width);
  picture.setAttribute("height", height);
  for (const value of ticks(x, 90)) {
    make("path", {class: "tick", d: `M${x.at(value)} ${top}V${height - bottom}`}, picture);
    make("text", {x: x.at(value), y: height - bottom + 11}, picture, size(value));
  }
  for (const value of ticks(y, 40)) {
    make("path", {class: "tick", d: `M${left} ${y.at(value)}H${width - right}`}, picture);
    make("text", {class: "ends", x: left - 6, y: y.at(value)}, picture, duration(value));
  }
  make("text", {class: "ends", x: width - right, y: height - 9}, picture, "memory of the fullest device");
  make("text", {class: "begins", x: 2, y: height - 9}, picture, "\u2191 time of a step");
  make("path", {class: "bound", d: `M${left} ${y.at(bound)}H${width - right}`}, picture);
  make("text", {class: "begins", x: left + 6, y: y.at(bound) + 9}, picture, `lower bound: ${duration(bound)}`);
  for (const value of shown) {
    make("path", {class: "limit", d: `M${x.at(value)} ${top}V${height - bottom}`}, picture);
    make("text", {class: "ends", x: x.at(value) - 5, y: top + 6}, picture, "memory limit");
  }
  const place = point => `${x.at(point.memory_bytes).toFixed(1)} ${y.at(point.step_seconds).toFixed(1)}`;
  make("path", {class: "front", d: `M${byMemory(point => !point.dominated).map(place).join("L")}`}, picture);
  for (const point of [...points].sort((one, other) => other.dominated - one.dominated)) {
    const [cx, cy] = place(point).split(" "), name = point.dominated ? "dominated" : "best";
    const node = make("circle", {cx, cy, r: point.dominated ? 3.5 : 5.5, class: point === now ? `${name} now` : name}, picture);
    make("title", {}, node, pointInWords(point));
    node.addEventListener("click", () => choosePoint(point));
  }
}

// From values to places, with some room around them.
function scale(values, from, to) {
  const least = Math.min(...values), most = Math.max(...values), room = 0.1 * (most - least || most || 1);
  const [begin, end] = [Math.max(0, least - room), most + room];
  return {begin, end, from, to, at: value => from + (to - from) * (value - begin) / (end - begin)};
}

// Round values, at least so many pixels from each other: of bytes and of seconds.
function ticks({begin, end, from, to}, pixels) {
  const least = (end - begin) * pixels / Math.abs(to - from), unit = end > 1024 ? 1024 ** Math.floor(Math.log2(end) / 10) : 1;
  const power = 10 ** Math.floor(Math.log10(least / unit)) * unit;
  const step = [1, 2, 5, 10].map(n => n * power).find(step => step >= least * 0.999);
  const first = Math.ceil(begin / step);
  return Array.from({length: Math.max(0, Math.floor(end / step) - first + 1)}, (_, n) => (first + n) * step);
}
