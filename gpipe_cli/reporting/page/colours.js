// The colours of palette.py: the hue stands for the micro-batch, from blue over red to yellow; the lightness for what
// is done. They are mixed in OKLCH (Ottosson, 2020), so that the lightness is even over all hues.
const FIRST_HUE = 262, LAST_HUE = 448;
const LIGHTNESS_AND_CHROMA = {F: [0.76, 0.12], R: [0.91, 0.055], B: [0.55, 0.13], I: [0.6, 0.135], W: [0.43, 0.1]};
const knownColours = new Map();

function colour(kind, microBatch, microBatches) {
  const name = `${kind} ${microBatch} ${microBatches}`;
  if (!knownColours.has(name)) {
    const share = microBatch / Math.max(1, microBatches - 1);
    knownColours.set(name, oklch(...LIGHTNESS_AND_CHROMA[kind], FIRST_HUE + share * (LAST_HUE - FIRST_HUE)));
  }
  return knownColours.get(name);
}

// The sRGB colour; chroma is lowered as far as a screen cannot show it.
function oklch(lightness, chroma, degrees) {
  const hue = degrees * Math.PI / 180;
  for (;;) {
    const linear = linearRgb(lightness, chroma * Math.cos(hue), chroma * Math.sin(hue));
    if (chroma < 1e-3 || linear.every(part => part >= -1e-4 && part <= 1 + 1e-4)) {
      return "#" + linear.map(part => hex(gamma(Math.min(1, Math.max(0, part))))).join("");
    }
    chroma *= 0.97;
  }
}

// Oklab to linear sRGB, with the numbers of its author.
function linearRgb(lightness, a, b) {
  const long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3;
  return [
    4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
    -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
    -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
  ];
}

function gamma(part) {
  return part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055;
}

function hex(part) {
  return Math.round(255 * part).toString(16).padStart(2, "0");
}
