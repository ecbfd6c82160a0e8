// Numbers and terms in words, as the tables of the command line have them.
const KIND_WORDS = {F: "forward", R: "recompute", B: "backward", I: "backward of inputs", W: "backward of weights"};
const IDLE = ["bubble", "imbalance", "transfer", "set_up"];
const ORDERS = {
  gpipe: "all forwards, then all backwards: as in the paper",
  "1f1b": "each backward as early as possible, then a forward and a backward in turns",
  interleaved: "1f1b for devices with several stages, which are not neighbours",
  zero_bubble: "1f1b with each backward split: weight gradients (W) may fill idle time",
  zbv: "no bubble on a V: devices have two stages, one down and one back up",
  v_half: "on a V as zbv, with half of the activations",
  v_min: "on a V as zbv, with a third of the activations",
  auto: "an order searched for these times and this memory",
  file: "the order of the file that the run has",
};
const PLACEMENTS = {
  neighbours: "a device has consecutive stages: as in the paper",
  looped: "micro-batches pass through all devices several times: stages 0, P, 2P, \u2026 of P devices are on the first",
  v: "micro-batches go to the last device and come back: the first device has the last stage, too",
  "as planned": "as the file has it that the PLANNED has",
};
const RECOMPUTES = {
  never: "keeps the activations of all micro-batches",
  except_last: "recomputes all micro-batches but those whose backward comes right after their forward: with gpipe the " +
    "last one, with 1f1b all on the last stage",
  always: "recomputes every micro-batch, as in the paper",
  auto: "as few micro-batches as the memory allows; of settings other than the plan's none, or if that does not fit, " +
    "as except_last",
};
const WORDS = {
  stage: "A part of the model: some of its layers, one after another. It computes on its own device, or takes turns " +
    "with others on one. Each stage has a row; stages of one device that are not neighbours share a row, the later " +
    "ones lower in it.",
  placement: "Which device has which stages, if they have several each. Between stages of one device nothing is sent.",
  "1F0": "An action in full: the stage, what it does, the micro-batch. 1F0 is F0 in the row of stage 1.",
  "micro-batch": "One of the M pieces of a mini-batch, as equal as they can be. While one stage works on a piece, " +
    "the next stage can work on the piece before it. That is what makes a pipeline fast.",
  forward: "F: a stage computes its outputs for a micro-batch, and sends them to the next stage.",
  backward: "B: a stage computes gradients of a micro-batch, and sends those of its inputs to the stage before. " +
    "If it is cut in two, the action I computes what is sent, and W the gradients of the weights, for which nobody waits.",
  recompute: "R: the forward pass again. A stage that does not keep the activations of a micro-batch saves memory, " +
    "and has to compute them again before its backward.",
  activations: "What the forward pass must keep for its backward pass: they are most of the memory while many micro-batches " +
    "are on their way.",
  memory: "What a device holds for the layers of its stages: weights, their gradients, the state of the optimizer, buffers for sums " +
    "over replicas and for checkpoints, work space of one layer, and activations. What the libraries and the process " +
    "hold by themselves comes on top.",
  schedule: "Which actions each device performs, and in which order.",
  "1F1B": "A schedule: each backward as early as possible, then one forward and one backward in turns. Only K " +
    "micro-batches are under way at a time, so that a stage keeps fewer activations than in GPipe's order.",
  bubble: "Idle time that even equal stages would have: the last stages wait at the beginning for their first " +
    "micro-batch, and the first stages while it comes back. Of equal stages, with gpipe or 1f1b and without " +
    "recomputation, its share is (K-1)/(M+K-1): more micro-batches make it small. Counted as bubble is all idle time not due to " +
    "imbalance, transfer or set-up.",
  imbalance: "Idle time because one stage has more work than another, and all wait for the slowest.",
  transfer: "Time in which a stage waits for tensors that are computed, and still on their way over the link.",
  "set-up": "The rest of a step, before and after the actions: to fetch the data, to start the work.",
  update: "The optimizer changes the weights, once per step.",
};

// Whose setting the page begins with.
function owner() {
  return data.run ? "run" : "plan";
}

// Whether devices share cores or memory, and so slow each other down.
function devicesShare() {
  return data.slowdown.at_once !== null || data.slowdown.factor !== 1;
}

function duration(seconds) {
  if (seconds < 0) return "-" + duration(-seconds);
  if (seconds > 0 && seconds < 0.99995e-4) return `${(1e6 * seconds).toFixed(1)} \u00b5s`;
  if (seconds < 0.9995) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 9.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(seconds) / 60), rest = Math.round(seconds) % 60;
  if (minutes < 60) return `${minutes} min ${String(rest).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

function size(bytes) {
  for (const [power, unit] of [[3, "GiB"], [2, "MiB"], [1, "KiB"]]) {
    if (bytes >= 1024 ** power) return `${(bytes / 1024 ** power).toFixed(1)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function decimal(value) {
  return value.toLocaleString("en", {maximumSignificantDigits: value < 1000 ? 3 : 4});
}

function shareWord(name) {
  return name.replace("_", "-");
}

// "13 % shorter"; "as long" where the difference would be shown as 0.
function difference(value, of, less, more, same) {
  const change = value / of - 1;
  return Math.abs(change) < 0.0005 ? same : `${percent(Math.abs(change))} ${change < 0 ? less : more}`;
}

// "F2", without its stage: the row says that.
function shortName(action) {
  return action.kind + action.micro_batch;
}

function capital(text) {
  return text[0].toUpperCase() + text.slice(1);
}

// "1, 2 and 5"
function list(parts) {
  return parts.length < 2 ? parts.join("") : `${parts.slice(0, -1).join(", ")} and ${parts.at(-1)}`;
}
