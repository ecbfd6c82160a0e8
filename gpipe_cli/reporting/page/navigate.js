// Pointing, panning and zooming: with pointer, wheel and keys.
const explained = field("explained"), tip = field("tip");
const live = field("live");

// ---- pointing ----

function sentence(piece, time) {
  const {figure, what, stage} = piece;
  if (what === "action") return explainAction(figure, piece.span);
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

// Highlights one micro-batch in all stages.
function light({figure, span}) {
  const one = drawn.get(figure.kind);
  one.group.classList.add("lighting");
  for (const {node, text, span: other} of one.bars.values()) {
    if (other.action.micro_batch !== span.action.micro_batch) continue;
    node.classList.add("lit");
    text.classList.add("lit");
  }
}

// Arrows along the path of the pointed action's micro-batch.
function placePointed() {
  const group = layers.pointed, {pointed} = state;
  group.replaceChildren();
  group.setAttribute("clip-path", "url(#plot)");
  if (pointed?.what !== "action") return;
  const {figure, span} = pointed;
  for (const other of figure.spanOf.values()) {
    if (other === span || other.action.micro_batch !== span.action.micro_batch) continue;
    const needed = source(figure, other.action);
    if (needed) arrow(group, figure.kind, needed, other, "arrow before");
  }
  const needed = source(figure, span.action), earlier = sameStageSource(figure, span.action);
  if (earlier && span.start - earlier.end > NEAR) arc(group, figure.kind, earlier, span);
  if (needed) arrow(group, figure.kind, needed, span, "arrow");
}

function arrow(group, kind, from, to, name) {
  const {rows} = drawn.get(kind), [one, other] = [from, to].map(({action}) => rows[action.stage]);
  if (one === other) { // on the same device: no link
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

// An arrow to another action of the same lane, above the actions between.
function arc(group, kind, from, to, name = "arrow before") {
  const x1 = xOf(from.end) - 2, x2 = Math.max(xOf(to.start) + 2, x1 + 6);
  const [y1, y2] = [from, to].map(({action}) => laneY(kind, action.stage) - 4), up = Math.min(24, 8 + (x2 - x1) / 8) - 4;
  const d = `M${x1} ${y1}C${x1 + 12} ${y1 - up} ${x2 - 12} ${y2 - up} ${x2} ${y2}`;
  if (!name.includes("before")) make("path", {class: "halo", d}, group);
  make("path", {class: name, d}, group);
}

function stepsEnd() {
  const shown = [...drawn.values()].map(one => one.figure).filter(figure => figure.kind !== "K = 1");
  return Math.max(...shown.map(figure => figure.step_seconds), state.originalFigure.step_seconds);
}

// ---- panning and zooming ----

function longest() {
  return Math.max(...[...drawn.values()].map(one => one.figure.step_seconds), state.originalFigure.step_seconds) * 1.02;
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

// The centre of a zoom without a pointer: the pointed action, or the middle.
function zoomCentre() {
  const {span} = state.pointed ?? {}, x = span ? xOf((span.start + span.end) / 2) : -1;
  return x >= view.left && x <= view.width - RIGHT ? x : view.left + plotWidth() / 2;
}

// Zooms in by a factor, keeping the time at x in place.
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
  const {piece} = event.target;
  if (piece?.what === "action" && piece.figure.kind === "simulated") dragAction(event, piece);
  else {
    const from = event.clientX, start = view.start;
    drag(event, moved => moveTo(start - (moved.clientX - from) * view.seconds / plotWidth()));
  }
}

// Follows the pointer until it is released; without movement nothing is dragged.
function drag(event, follow, end = () => {}) {
  let moving = false;
  const controller = new AbortController(), options = {signal: controller.signal};
  addEventListener("pointermove", moved => {
    if (!moving && Math.hypot(moved.clientX - event.clientX, moved.clientY - event.clientY) < 4) return;
    moving = true;
    state.dragging = true;
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

function onPointerMove(event) {
  if (state.dragging) return;
  const {piece} = event.target;
  if (piece) pointAt(piece, pointerTime(event));
  else if (state.pointed) pointAt(null);
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

// The target of an arrow key: the next action of the lane, or the nearest in time of the next lane.
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
  } else if (piece?.what === "action" && arrows.includes(event.key)) {
    event.preventDefault();
    if (event.altKey) {
      if (piece.figure.kind === "simulated") moveByKey(piece, event.key);
      return;
    }
    const next = neighbour(piece, event.key);
    if (next) focusAction(next[0], gpipe.key(next[1].action));
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
  svg.addEventListener("pointerleave", () => state.dragging || pointAt(null));
  svg.addEventListener("pointerdown", onPointerDown);
  svg.addEventListener("wheel", onWheel, {passive: false});
  svg.parentNode.addEventListener("focusin", onFocus); // on an SVG it would make that a stop of the Tab key
  svg.addEventListener("keydown", onKey);
  document.addEventListener("keydown", onPageKey);
  const on = (id, does) => field(id).addEventListener("click", does);
  on("closer", () => zoom(1.6));
  on("wider", () => zoom(1 / 1.6));
  on("fit", fit);
  new ResizeObserver(() => {
    if (view.width !== Math.max(280, svg.parentNode.clientWidth)) redraw();
  }).observe(svg.parentNode);
}
