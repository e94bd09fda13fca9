/**
 * Canvases: size in device pixels, fitting text, and pointer events.
 *
 * Input: a box of the page. Output: two stacked canvases that follow its size, one for
 * the picture and one for the cursor and selections above it; gestures as calls.
 */

import { el } from "./dom.js";

/**
 * Make a picture that accepts keyboard input.
 * label: its name; keys: its keyboard shortcuts; help: id of the element that explains them.
 * Returns {box, base, above, width, height, ratio, onResize}; sizes in CSS pixels.
 */
export function makePicture(label, keys, help) {
  const canvases = [0, 1].map(() => el("canvas", { "aria-hidden": "true" }));
  const box = el(
    "div",
    {
      class: "picture",
      tabindex: "0",
      role: "application",
      "aria-label": label,
      "aria-keyshortcuts": keys,
      "aria-describedby": help,
    },
    canvases,
  );
  const picture = { box, width: 0, height: 0, ratio: 1, onResize: () => {} };
  [picture.base, picture.above] = canvases.map((canvas) => canvas.getContext("2d"));
  new ResizeObserver(() => {
    if (fit(picture, canvases)) picture.onResize();
  }).observe(box);
  return picture;
}

function fit(picture, canvases) {
  const [width, height] = [picture.box.clientWidth, picture.box.clientHeight];
  const ratio = window.devicePixelRatio || 1;
  const same = width === picture.width && height === picture.height;
  if (!width || !height || (same && ratio === picture.ratio)) return false;
  Object.assign(picture, { width, height, ratio });
  for (const canvas of canvases) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  return true;
}

/** Clear a layer; return its context, set to CSS pixels and the font of the page. */
export function begin(picture, layer) {
  const ctx = picture[layer];
  ctx.setTransform(picture.ratio, 0, 0, picture.ratio, 0, 0);
  ctx.clearRect(0, 0, picture.width, picture.height);
  ctx.font = font(11);
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  ctx.lineWidth = 1;
  ctx.setLineDash([]);
  return ctx;
}

/** The page's font, as CSS; size in pixels. */
export function font(size, weight = 400) {
  return `${weight} ${size}px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif`;
}

/** Shorten a text with an ellipsis until it fits; "" if not even one letter does. */
export function fitText(ctx, text, width) {
  if (ctx.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (ctx.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low > 1 ? `${text.slice(0, low)}…` : "";
}

/**
 * Follow pointers and wheel. Calls these functions of `does`, with positions in CSS pixels
 * of the box: hover({x, y} or null), click({x, y}), drag({from, last, to, shift, done}),
 * wheel({x, y, dx, dy, zoom}) -> true if the event was used.
 */
export function follow(picture, does) {
  const { box } = picture;
  let down = null;
  const place = (event) => {
    const frame = box.getBoundingClientRect();
    return { x: event.clientX - frame.left, y: event.clientY - frame.top };
  };
  const drag = (event, done) => {
    const to = place(event);
    if (!down.moved && Math.hypot(to.x - down.from.x, to.y - down.from.y) < 4) return;
    down.moved = true;
    does.drag?.({ from: down.from, last: down.last, to, shift: down.shift, done });
    down.last = to;
  };
  box.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    box.setPointerCapture(event.pointerId);
    const from = place(event);
    down = { from, last: from, shift: event.shiftKey, moved: false };
  });
  box.addEventListener("pointermove", (event) => {
    if (down) drag(event, false);
    else does.hover?.(place(event));
  });
  box.addEventListener("pointerup", (event) => {
    if (!down) return;
    drag(event, true);
    if (!down.moved) does.click?.(place(event));
    down = null;
  });
  box.addEventListener("pointercancel", () => {
    down = null;
  });
  box.addEventListener("pointerleave", () => {
    if (!down) does.hover?.(null);
  });
  box.addEventListener(
    "wheel",
    (event) => {
      const zoom = event.ctrlKey || event.metaKey;
      const used = does.wheel?.({ ...place(event), dx: event.deltaX, dy: event.deltaY, zoom });
      if (used) event.preventDefault();
    },
    { passive: false },
  );
}
