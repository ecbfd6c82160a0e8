// What is pointed at, the play head, and moving in time: with pointer, wheel and keys.
const explained = field("explained"), tip = field("tip");
const live = field("live");

// ---- what is pointed at ----

function sentence(piece, time) {
  const {figure, what, stage} = piece;
  if (what === "action") return figure.order ? actionLabel(figure, piece.span) : explainAction(figure, piece.span);
  if (what === "region") return explainRegion(figure, piece.region);
  if (what === "event") return explainEvent(figure, piece.event);
  return what === "memory" ? explainMemory(figure, stage, time) : explainStage(figure, stage);
}

function pointAt(piece, time = 0) {
  if (piece === state.pointed && piece?.what !== "memory") return;
  const one = state.pointed && drawn.get(state.pointed.figure.kind);
  one?.group.classList.remove("lighting");
  one?.group.querySelectorAll(".lit").forEach(node => node.classList.remove("lit"));
  state.pointed = piece;
  if (piece) explained.textContent = `${piece.figure.kind}: ${sentence(piece, time)}`;
  if (piece?.what === "action") light(piece);
  if (piece?.what === "region") regionNode(piece)?.classList.add("lit");
  requestPlace();
}

function regionNode({figure, stage, region}) {
  return [...drawn.get(figure.kind).rows[stage]?.node.querySelectorAll("rect.region") ?? []]
    .find(node => node.piece.region.start === region.start);
}

// The way of one micro-batch through all stages.
function light({figure, span}) {
  const one = drawn.get(figure.kind);
  if (figure.large) return; // of a picture nothing can light up
  one.group.classList.add("lighting");
  for (const {node, text, span: other} of one.bars.values()) {
    if (other.action.micro_batch !== span.action.micro_batch) continue;
    node.classList.add("lit");
    text.classList.add("lit");
  }
}

function showTip(event, piece) {
  tip.hidden = !piece || ["stage", "memory"].includes(piece.what) || view.width < 560; // there it would cover too much
  if (tip.hidden) return;
  const {span, region, event: happened} = piece, shown = span || region || happened;
  const name = span ? `${(piece.figure.joined ? gpipe.key : shortName)(span.action)} ${KIND_WORDS[span.action.kind]}`
    : shareWord(region?.why ?? happened.what);
  const {start, end} = shown, times = `\nstarts at ${duration(start)}, takes ${duration(end - start)}`;
  tip.textContent = piece.figure.order ? name : name + times;
  const below = event.clientY + 18 + tip.offsetHeight < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? event.clientY + 18 : event.clientY - tip.offsetHeight - 10}px`;
}

// Arrows, the critical path, and what waits for what in an order that cannot run.
function placePointed() {
  const group = layers.pointed;
  group.replaceChildren();
  group.setAttribute("clip-path", "url(#plot)");
  const simulated = drawn.get("simulated")?.figure;
  if (simulated?.waits) simulated.waits.forEach(names => waitArrow(group, simulated, names));
  else if (state.critical && simulated) criticalPath(group, simulated);
  const {pointed} = state;
  if (pointed?.what !== "action" && simulated && !simulated.order && !state.critical) {
    const first = [...simulated.spanOf.values()].filter(({action}) => action.micro_batch === 0);
    for (const other of first) skipArrows(group, simulated, other, "before");
  }
  if (pointed?.what !== "action" || pointed.figure.order) return;
  const {figure, span} = pointed;
  for (const other of figure.spanOf.values()) {
    if (other === span || other.action.micro_batch !== span.action.micro_batch) continue;
    const needed = source(figure, other.action);
    if (needed) arrow(group, figure.kind, needed, other, "arrow before");
    skipArrows(group, figure, other, "before");
  }
  const needed = source(figure, span.action), own = ownSource(figure, span.action);
  if (own && span.start - own.end > NEAR) arc(group, figure.kind, own, span);
  if (needed) arrow(group, figure.kind, needed, span, "arrow");
  skipArrows(group, figure, span, "");
}

// Between neighbours a skip goes with what the next layer gets.
function skipArrows(group, figure, span, name) {
  for (const {sender, receiver, from} of skipsInto(figure, span.action)) {
    if (receiver > sender + 1) arrow(group, figure.kind, from, span, `arrow skip ${name}`);
  }
}

function arrow(group, kind, from, to, name) {
  const {rows} = drawn.get(kind), [one, other] = [from, to].map(({action}) => rows[action.stage]);
  if (one === other) { // of one device: no link
    arc(group, kind, from, to, name);
    return;
  }
  const [x1, x2] = [xOf(from.end) - 2, xOf(to.start) + 2];
  const [y1, y2] = [laneY(kind, from.action.stage), laneY(kind, to.action.stage)];
  const bend = Math.max(14, Math.abs(x2 - x1) / 2);
  const d = `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  if (!name.includes("before")) make("path", {class: "halo", d}, group);
  make("path", {class: name, d}, group);
}

// From an action to one of the same lane, over what is between.
function arc(group, kind, from, to, name = "arrow before") {
  const x1 = xOf(from.end) - 2, x2 = Math.max(xOf(to.start) + 2, x1 + 6);
  const [y1, y2] = [from, to].map(({action}) => laneY(kind, action.stage) - 4), up = Math.min(24, 8 + (x2 - x1) / 8) - 4;
  const d = `M${x1} ${y1}C${x1 + 12} ${y1 - up} ${x2 - 12} ${y2 - up} ${x2} ${y2}`;
  if (!name.includes("before")) make("path", {class: "halo", d}, group);
  make("path", {class: name, d}, group);
}

function waitArrow(group, figure, names) {
  const [waiting, needed] = names.map(name => figure.spanOf.get(name));
  if (!waiting || !needed) return;
  const [x1, x2] = [waiting, needed].map(span => (xOf(span.start) + xOf(span.end)) / 2);
  const [y1, y2] = [waiting, needed].map(span => laneY("simulated", span.action.stage));
  const {rows} = drawn.get("simulated"), same = rows[waiting.action.stage] === rows[needed.action.stage];
  const d = `M${x1} ${y1}${same ? `Q${(x1 + x2) / 2} ${Math.min(y1, y2) - 26} ` : "L"}${x2} ${y2}`;
  make("path", {class: "halo", d}, group);
  make("path", {class: "arrow waits", d}, group);
}

function criticalPath(group, figure) {
  let d = "";
  for (const {action, start, end, what} of gpipe.critical(figure.timeline, figure.rows)) {
    if (what === "transfer") continue; // it is the line to the next action
    const y = laneY("simulated", action.stage, 0.85); // below the names
    d += `${d ? "L" : "M"}${xOf(start) + 2} ${y}L${xOf(end) - 2} ${y}`;
  }
  make("path", {class: "halo", d}, group);
  make("path", {class: "path", d}, group);
}

// ---- the play head ----

function stepsEnd() {
  const shown = [...drawn.values()].filter(one => one.figure.kind !== "K = 1");
  // an order has no times to compare
  const own = shown.some(one => one.figure.order) ? 0 : state.ownFigure.step_seconds;
  return Math.max(...shown.map(one => one.figure.step_seconds), own);
}

function placeHead() {
  layers.head.replaceChildren();
  if (state.time === null) return;
  const x = xOf(state.time);
  if (x < view.left - 1 || x > view.width - RIGHT + 1) return;
  make("path", {class: "head", d: `M${x} ${AXIS - 6}V${view.height - AXIS + 4}`}, layers.head);
  make("path", {class: "head", d: `M${x - 5} ${AXIS - 14}H${x + 5}L${x} ${AXIS - 5}z`}, layers.head);
}

function setTime(seconds) {
  state.time = Math.min(Math.max(0, seconds), stepsEnd());
  const slider = field("time");
  slider.value = 1000 * state.time / stepsEnd();
  slider.setAttribute("aria-valuetext", duration(state.time));
  const figure = drawn.get("simulated").figure;
  if (!figure.order) explained.textContent = `simulated, ${explainMoment(figure, state.time)}`;
  if (state.time > view.start + view.seconds || state.time < view.start) moveTo(state.time - view.seconds / 10);
  requestPlace();
}

function play(on) {
  state.playing = on;
  const button = field("play");
  button.textContent = on ? "\u275a\u275a" : "\u25b6";
  button.setAttribute("aria-label", on ? "pause" : "play");
  if (!on) {
    if (state.time !== null) live.textContent = explained.textContent;
    return;
  }
  if (state.time === null || state.time >= stepsEnd() * 0.999) setTime(0);
  let before = performance.now();
  const tick = now => {
    if (!state.playing) return;
    const long = Number(field("speed").value);
    setTime(state.time + (now - before) / 1000 * stepsEnd() / long);
    before = now;
    if (state.time >= stepsEnd()) play(false);
    else requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
}

// ---- moving in time ----

function longest() {
  return Math.max(...[...drawn.values()].map(one => one.figure.step_seconds), state.ownFigure.step_seconds) * 1.02;
}

function fit() {
  view.fitted = true;
  view.start = 0;
  view.seconds = stepsEnd() * 1.015;
  requestPlace();
}

function moveTo(start) {
  view.fitted = false;
  view.start = Math.max(0, Math.min(start, Math.max(longest(), view.seconds) - view.seconds));
  requestPlace();
}

// What is zoomed around without a pointer: the action that is pointed at, or the middle.
function zoomCentre() {
  const {span} = state.pointed ?? {}, x = span ? xOf((span.start + span.end) / 2) : -1;
  return x >= view.left && x <= view.width - RIGHT ? x : view.left + plotWidth() / 2;
}

// Everything closer by a factor, with what is at x where it was.
function zoom(factor, x = zoomCentre()) {
  const time = timeOf(x), all = Math.max(longest(), stepsEnd() * 1.015);
  view.seconds = Math.min(all, Math.max(all * 1e-4, view.seconds / factor));
  moveTo(time - (x - view.left) * view.seconds / plotWidth());
}

function onWheel(event) {
  const {left, top} = svg.getBoundingClientRect(), x = event.clientX - left, y = event.clientY - top;
  const zooms = event.ctrlKey || event.metaKey || y < AXIS || y > view.height - AXIS;
  if (!zooms && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return; // the page scrolls
  event.preventDefault();
  if (zooms) zoom(Math.exp(-event.deltaY * 0.002), Math.max(view.left, x));
  else moveTo(view.start + event.deltaX * view.seconds / plotWidth());
}

function pointerTime(event) {
  return timeOf(event.clientX - svg.getBoundingClientRect().left);
}

function onPointerDown(event) {
  if (event.button !== 0) return;
  const y = event.clientY - svg.getBoundingClientRect().top, piece = event.target.piece;
  if (y < AXIS || y > view.height - AXIS) drag(event, moved => setTime(pointerTime(moved)), true);
  else if (piece?.what === "action" && piece.figure.kind === "simulated") dragAction(event, piece);
  else {
    const from = event.clientX, start = view.start;
    drag(event, moved => moveTo(start - (moved.clientX - from) * view.seconds / plotWidth()));
  }
}

// Follows the pointer until it is released; a click without a way is none, unless asked for.
function drag(event, follow, atOnce = false, end = () => {}) {
  let moving = atOnce;
  const controller = new AbortController(), options = {signal: controller.signal};
  if (atOnce) follow(event);
  addEventListener("pointermove", moved => {
    if (!moving && Math.hypot(moved.clientX - event.clientX, moved.clientY - event.clientY) < 4) return;
    moving = true;
    state.dragging = true;
    tip.hidden = true;
    follow(moved);
  }, options);
  const stop = done => {
    controller.abort();
    state.dragging = false;
    end(moving && done);
  };
  addEventListener("pointerup", () => stop(true), options);
  addEventListener("pointercancel", () => stop(false), options);
  addEventListener("keydown", pressed => pressed.key === "Escape" && stop(false), options);
}

// What the pointer is on; of many bars there is one picture, and their times tell.
function pieceAt(event) {
  const piece = event.target.piece ?? null, time = pointerTime(event);
  if (piece?.what !== "lane") return piece;
  const {figure} = piece, {spans} = drawn.get(figure.kind).rows[piece.stage];
  const span = spans.find(one => one.start <= time && time < one.end);
  if (!span) return null;
  return state.pointed?.span === span ? state.pointed : {figure, what: "action", stage: span.action.stage, span};
}

function onPointerMove(event) {
  if (state.dragging) return;
  const piece = pieceAt(event);
  if (piece) pointAt(piece, pointerTime(event));
  else if (state.pointed) pointAt(null);
  showTip(event, piece);
}

// ---- keys ----

function focusAction(kind, key) {
  const found = drawn.get(kind)?.bars.get(key);
  if (!found) return;
  svg.querySelectorAll('.action[tabindex="0"]').forEach(node => node.setAttribute("tabindex", -1));
  found.node.setAttribute("tabindex", 0);
  const {start, end} = found.span;
  if (start < view.start || end > view.start + view.seconds) moveTo(start - view.seconds / 4);
  found.node.focus({preventScroll: false});
}

function onFocus(event) {
  const {piece} = event.target;
  if (!piece) return;
  pointAt(piece);
  live.textContent = explained.textContent;
  svg.querySelectorAll('.action[tabindex="0"]').forEach(node => node.setAttribute("tabindex", -1));
  event.target.setAttribute("tabindex", 0);
}

// The action that an arrow key goes to: the next one of the lane, or the nearest in time of the next lane.
function neighbour({figure, span, stage}, key) {
  const {spans} = drawn.get(figure.kind).rows[stage], at = spans.indexOf(span);
  const along = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: spans.length - 1}[key];
  if (along !== undefined) return spans[along] && [figure.kind, spans[along]];
  const lanes = [...drawn.values()].sort((a, b) => a.top - b.top).flatMap(one => one.lanes.map(lane => [one, lane]));
  const now = lanes.findIndex(([one, lane]) => one.figure === figure && lane.spans === spans);
  const next = lanes[now + (key === "ArrowDown" ? 1 : -1)];
  if (!next) return undefined;
  const middle = (span.start + span.end) / 2, away = other => Math.abs((other.start + other.end) / 2 - middle);
  return [next[0].figure.kind, next[1].spans.reduce((best, other) => away(other) < away(best) ? other : best)];
}

function onKey(event) {
  const {piece} = event.target;
  const arrows = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"];
  if (event.key === "Escape") {
    pointAt(null);
    tip.hidden = true;
  } else if (piece?.what === "action" && arrows.includes(event.key)) {
    event.preventDefault();
    if (event.altKey) {
      if (piece.figure.kind === "simulated") moveByKey(piece, event.key);
      return;
    }
    const next = neighbour(piece, event.key);
    if (next) focusAction(next[0], gpipe.key(next[1].action));
  } else if (piece && event.key === " ") {
    event.preventDefault();
    play(!state.playing);
  }
}

function onPageKey(event) {
  if (event.target.closest?.("select") || event.altKey) return;
  const key = event.key.toLowerCase();
  if ((event.ctrlKey || event.metaKey) && key === "z") {
    event.preventDefault();
    undo();
  }
  if (event.ctrlKey || event.metaKey) return;
  const does = {w: () => zoom(1.4), s: () => zoom(1 / 1.4), a: () => moveTo(view.start - view.seconds / 6),
                d: () => moveTo(view.start + view.seconds / 6)}[key];
  if (does) does();
}

function startNavigation() {
  svg.addEventListener("pointermove", onPointerMove);
  svg.addEventListener("pointerleave", event => state.dragging || (pointAt(null), showTip(event, null)));
  svg.addEventListener("pointerdown", onPointerDown);
  svg.addEventListener("wheel", onWheel, {passive: false});
  svg.parentNode.addEventListener("focusin", onFocus); // on an SVG it would make that a stop of the Tab key
  svg.addEventListener("keydown", onKey);
  document.addEventListener("keydown", onPageKey);
  const on = (id, what, does) => field(id).addEventListener(what, does);
  on("play", "click", () => play(!state.playing));
  on("time", "input", event => setTime(event.target.value / 1000 * stepsEnd()));
  on("closer", "click", () => zoom(1.6));
  on("wider", "click", () => zoom(1 / 1.6));
  on("fit", "click", fit);
  for (const [text, seconds] of [["slow", 24], ["medium", 10], ["fast", 4]]) {
    field("speed").append(new Option(`${text}: ${seconds} s a step`, seconds));
  }
  field("speed").value = 10;
  new ResizeObserver(() => {
    if (view.width !== Math.max(280, svg.parentNode.clientWidth)) redraw();
  }).observe(svg.parentNode);
}
