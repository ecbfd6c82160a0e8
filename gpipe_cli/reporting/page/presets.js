// On the site one page has many plans, of which its address names one: #preset=digits. Each is packed, as all of them
// together are megabytes.
const given = JSON.parse(field("data").textContent);

async function opened() {
  if (!given.presets) return given;
  const preset = given.presets.find(({name}) => name === presetOfAddress(given.presets));
  const bytes = Uint8Array.from(atob(preset.packed), letter => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return {...given, ...await new Response(stream).json(), preset};
}

function presetOfAddress(presets) {
  const asked = new URLSearchParams(location.hash.slice(1)).get("preset");
  return presets.some(({name}) => name === asked) ? asked : presets[0].name;
}

function startPresets() {
  if (!data.preset) return;
  const choice = field("preset"), groups = new Map();
  for (const {name, group, title} of given.presets) {
    if (!groups.has(group)) {
      const part = choice.appendChild(document.createElement("optgroup"));
      part.label = group;
      groups.set(group, part);
    }
    groups.get(group).append(new Option(title, name));
  }
  choice.value = data.preset.name;
  choice.addEventListener("change", () => location.hash = `preset=${choice.value}`);
  field("presets").hidden = false;
  field("preset-text").hidden = !data.preset.note;
  field("preset-text").textContent = data.preset.note;
}
