/**
 * Axes of canvases: positions and labels of ticks.
 *
 * Input: a range, its scale to pixels, and a box. Output: lines and numbers on a canvas.
 */

import { ticks, tickStep } from "../vendor/d3-array/d3-array.min.js";

/**
 * Draw the tick marks and numbers of a horizontal range below a box.
 * say(value, step): text of a tick, or null for none; step: distance between ticks.
 */
export function axisBelow(ctx, range, at, box, colours, say, every = 90) {
  const num = Math.max(2, Math.floor((box.right - box.left) / every));
  const step = tickStep(range[0], range[1], num);
  ctx.textAlign = "center";
  let end = -Infinity;
  for (const value of ticks(range[0], range[1], num)) {
    const text = say(value, step);
    const x = Math.round(at(value)) + 0.5;
    if (text === null || x < box.left || x > box.right) continue;
    ctx.strokeStyle = colours.line;
    line(ctx, x, box.bottom, x, box.bottom + 4);
    const half = ctx.measureText(text).width / 2;
    const middle = Math.min(Math.max(x, box.left + half), box.right - half);
    if (middle - half < end + 8) continue;
    ctx.fillStyle = colours.muted;
    ctx.fillText(text, middle, box.bottom + 12);
    end = middle + half;
  }
}

/** Draw one line. */
export function line(ctx, x0, y0, x1, y1) {
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}

/** Draw an arrow from (x0, y0) to (x1, y1), with a head of `size` pixels. */
export function arrow(ctx, x0, y0, x1, y1, size = 6) {
  const angle = Math.atan2(y1 - y0, x1 - x0);
  line(ctx, x0, y0, x1 - Math.cos(angle) * size, y1 - Math.sin(angle) * size);
  ctx.beginPath();
  ctx.moveTo(x1, y1);
  for (const side of [-0.45, 0.45]) {
    ctx.lineTo(x1 - Math.cos(angle + side) * size * 1.3, y1 - Math.sin(angle + side) * size * 1.3);
  }
  ctx.closePath();
  ctx.fill();
}
