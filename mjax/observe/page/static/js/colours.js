/**
 * Colours of pictures, for the light and the dark scheme.
 *
 * Input: the custom properties of style.css. Output: colours by name, tables of 256
 * colours for canvases, and a call when the browser's colour scheme changes.
 *
 * Source of the scale: cividis, Nuñez, Anderton and Renslow 2018, doi:10.1371/
 * journal.pone.0199239, which looks the same with and without colour blindness. The table
 * has 33 of its 256 colours; those between are interpolated. Colours of kinds: after Okabe
 * and Ito, but lighter, so that dark text can be read on each.
 */

const CIVIDIS = (
  "00224e 00285b 002e6a 053371 1a386f 273e6e 32436d 3b496c 434e6c 4b546c " +
  "535a6d 5a5f6e 61656f 686a71 6f7073 767676 7d7c78 848279 8c8878 938e78 9b9476 a39a74 " +
  "aba072 b4a76f bcae6c c4b468 cdbb63 d5c25e dec958 e7d150 f0d846 f9e03a fee838"
).split(" ");

/** Colours of spans by kind; text on them is INK. */
export const KIND_COLOURS = {
  compute: "#6cb0e8",
  tp: "#f0a860",
  pp: "#c79ae0",
  dp: "#58bfa5",
  optimizer: "#e6d15a",
  data: "#ee8a7a",
  host: "#b9c2cc",
  ckpt: "#e0a3c8",
  eval: "#a9c96b",
  restart: "#98a4b1",
  idle: "#d5dbe1",
};
export const BACKWARD = "#4a90d0";
export const INK = "#0d141b";

function rgb(hex) {
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function between(anchors, at) {
  const place = at * (anchors.length - 1);
  const low = Math.min(Math.floor(place), anchors.length - 2);
  const [a, b] = [rgb(anchors[low]), rgb(anchors[low + 1])];
  return a.map((value, index) => Math.round(value + (b[index] - value) * (place - low)));
}

/** Colour of a position from 0 to 1 on the scale, as CSS. */
export function cividis(part) {
  return `rgb(${between(CIVIDIS, Math.min(1, Math.max(0, part))).join(" ")})`;
}

/** Text colour for a position on the scale: black or white, with contrast 4.5 to 1 or more. */
export function inkOn(part) {
  return part > 0.47 ? "#000000" : "#ffffff";
}

/**
 * Return a table of pixels by byte of a cell, as in heat_data.js: 0 is no value, 1 to 255 is
 * the scale. none: colour of cells without a value, as #rrggbb.
 */
export function pixels(none) {
  const found = new Uint32Array(256);
  const pack = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  found[0] = pack(rgb(none.replace("#", "")));
  for (let value = 1; value < 256; value += 1) {
    found[value] = pack(between(CIVIDIS, (value - 1) / 254));
  }
  return found;
}

/** CSS gradient of the scale. */
export function gradient() {
  return `linear-gradient(to right, ${CIVIDIS.map((each) => `#${each}`).join(", ")})`;
}

/** Return the colours of the active scheme, by name. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = [
    "bg",
    "panel",
    "line",
    "grid",
    "text",
    "muted",
    "accent",
    "bad",
    "warn",
    "good",
    "none",
    "band",
    "second",
    "third",
  ];
  return Object.fromEntries(names.map((name) => [name, read(name)]));
}

/** Call `listener` whenever the scheme changes between light and dark. */
export function onScheme(listener) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener);
}
