/**
 * The heat map on its canvas: cells, hosts at the left, steps below, slow hosts marked.
 *
 * Input: a picture, a model {matrix, bytes, order, bands, outliers} and a view {x, y} in
 * columns and rows. Output: pixels; and the cells under a pixel.
 */

import { axisBelow, line } from "./axis.js";
import { begin, fitText, font } from "./canvas.js";
import { count } from "./format.js";
import { edges, pool } from "./heat_data.js";
import { scale } from "./range.js";

/** Return the box of the cells inside the picture, in CSS pixels. */
export function frame(picture) {
  const left = picture.width < 560 ? 62 : 104;
  return { left, top: 4, right: picture.width - 26, bottom: picture.height - 22 };
}

/** Draw the picture. */
export function drawHeat(picture, model, view, lut, colours) {
  const ctx = begin(picture, "base");
  const box = frame(picture);
  drawCells(ctx, picture, box, model, view, lut);
  const down = scale(view.y, [box.top, box.bottom]);
  drawHosts(ctx, box, model.bands, view, down, colours);
  const { steps } = model.matrix;
  const across = scale(view.x, [box.left, box.right]);
  const isWhole = steps.at(-1) - steps[0] === steps.length - 1;
  const zero = isWhole ? steps[0] : 0; // so that ticks are at round numbers of steps
  axisBelow(
    ctx,
    view.x.map((col) => col + zero),
    (value) => across(value - zero + 0.5),
    box,
    colours,
    (value) =>
      Number.isInteger(value) && steps[value - zero] !== undefined
        ? count(steps[value - zero])
        : null,
  );
  ctx.strokeStyle = colours.line;
  ctx.strokeRect(box.left - 0.5, box.top - 0.5, box.right - box.left + 1, box.bottom - box.top + 1);
  drawOutliers(ctx, box, model, across, down, colours);
}

function drawCells(ctx, picture, box, model, view, lut) {
  const { ratio } = picture;
  const width = Math.round((box.right - box.left) * ratio);
  const height = Math.round((box.bottom - box.top) * ratio);
  if (width < 1 || height < 1 || !model.matrix.cols) return;
  const image = new ImageData(width, height);
  const out = new Uint32Array(image.data.buffer);
  pool(model.bytes, model.matrix.cols, model.order, view, width, height, lut, out);
  ctx.putImageData(image, Math.round(box.left * ratio), Math.round(box.top * ratio));
}

function drawHosts(ctx, box, bands, view, down, colours) {
  ctx.textAlign = "right";
  const size = (box.bottom - box.top) / (view.y[1] - view.y[0]);
  let free = -Infinity;
  const labels = [];
  bands.forEach((band, index) => {
    if (band.to <= view.y[0] || band.from >= view.y[1]) return;
    const top = Math.max(down(band.from), box.top);
    const bottom = Math.min(down(band.to), box.bottom);
    if (index % 2 && bottom - top >= 8) {
      ctx.fillStyle = colours.band;
      ctx.fillRect(0, top, box.left - 1, bottom - top);
    }
    if (size * (band.to - band.from) >= 10 && band.from > view.y[0]) {
      ctx.strokeStyle = colours.panel;
      ctx.globalAlpha = 0.75;
      line(ctx, box.left, Math.round(top) - 0.5, box.right, Math.round(top) - 0.5);
      ctx.globalAlpha = 1;
    }
    const middle = (top + bottom) / 2;
    if (middle < free || middle < box.top + 4 || middle > box.bottom - 2) return;
    labels.push([band.host, middle]);
    free = middle + 15;
  });
  ctx.fillStyle = colours.text;
  for (const [host, middle] of labels)
    ctx.fillText(fitText(ctx, host, box.left - 12), box.left - 6, middle);
}

/** Letter of a slow host in the picture and in the list. */
export function letter(index) {
  return String.fromCharCode(65 + (index % 26)) + (index >= 26 ? Math.floor(index / 26) : "");
}

function drawOutliers(ctx, box, model, across, down, colours) {
  const places = new Map(Array.from(model.order, (row, place) => [model.matrix.ranks[row], place]));
  const { steps } = model.matrix;
  ctx.textAlign = "center";
  ctx.font = font(11, 700);
  model.outliers.forEach((outlier, index) => {
    const own = outlier.ranks
      .map((rank) => places.get(rank))
      .filter((place) => place !== undefined)
      .sort((a, b) => a - b);
    const first = steps.findIndex((step) => step >= outlier.since_step);
    for (const [from, to] of runs(own)) {
      const [top, bottom] = [Math.max(down(from), box.top), Math.min(down(to), box.bottom)];
      if (bottom <= top) continue;
      const x = Math.min(Math.max(across(Math.max(first, 0)), box.left), box.right);
      const high = Math.max(bottom - top, 3);
      ctx.strokeStyle = colours.bad;
      ctx.lineWidth = 2;
      ctx.strokeRect(x, top - 1, box.right - x, high + 2);
      const middle = Math.min(Math.max((top + bottom) / 2, box.top + 8), box.bottom - 8);
      ctx.fillStyle = colours.bad;
      ctx.fillRect(box.right + 4, middle - 8, 18, 16);
      ctx.fillStyle = colours.panel;
      ctx.fillText(letter(index), box.right + 13, middle + 0.5);
    }
  });
  ctx.lineWidth = 1;
}

function runs(places) {
  const found = [];
  for (const place of places) {
    if (found.length && found.at(-1)[1] === place) found.at(-1)[1] = place + 1;
    else found.push([place, place + 1]);
  }
  return found;
}

/** Draw the upper layer: the cell under the cursor, or the rectangle that is dragged. */
export function drawAbove(picture, model, view, cursor, dragged, colours) {
  const ctx = begin(picture, "above");
  const box = frame(picture);
  if (dragged) {
    const [x, y] = [Math.min(dragged.x0, dragged.x1), Math.min(dragged.y0, dragged.y1)];
    const [w, h] = [Math.abs(dragged.x1 - dragged.x0), Math.abs(dragged.y1 - dragged.y0)];
    ctx.fillStyle = colours.accent;
    ctx.globalAlpha = 0.25;
    ctx.fillRect(x, y, w, h);
    ctx.globalAlpha = 1;
    ctx.strokeStyle = "#ffffff";
    ctx.strokeRect(x + 0.5, y + 0.5, w, h);
    return;
  }
  if (!cursor) return;
  const across = scale(view.x, [box.left, box.right]);
  const down = scale(view.y, [box.top, box.bottom]);
  const [x0, x1] = [across(cursor.col), across(cursor.col + 1)];
  const [y0, y1] = [down(cursor.place), down(cursor.place + 1)];
  if (x1 < box.left || x0 > box.right || y1 < box.top || y0 > box.bottom) return;
  const [x, y] = [(x0 + x1) / 2, (y0 + y1) / 2];
  ctx.strokeStyle = "#ffffff";
  ctx.globalAlpha = 0.55;
  line(ctx, x, box.top, x, box.bottom);
  line(ctx, box.left, y, box.right, y);
  ctx.globalAlpha = 1;
  const [w, h] = [Math.max(x1 - x0, 6), Math.max(y1 - y0, 6)];
  ctx.lineWidth = 3;
  ctx.strokeStyle = "#0d141b";
  ctx.strokeRect(x - w / 2, y - h / 2, w, h);
  ctx.lineWidth = 1.5;
  ctx.strokeStyle = "#ffffff";
  ctx.strokeRect(x - w / 2, y - h / 2, w, h);
}

/** Return the ranges of rows and columns under a pixel, {rows, cols}; null outside. */
export function under(picture, model, view, { x, y }) {
  const box = frame(picture);
  if (x < box.left || x >= box.right || y < box.top || y >= box.bottom) return null;
  const xs = edges(view.x, Math.round(box.right - box.left), model.matrix.cols);
  const ys = edges(view.y, Math.round(box.bottom - box.top), model.order.length);
  const [px, py] = [Math.floor(x - box.left), Math.floor(y - box.top)];
  return {
    cols: [Math.min(xs[px], model.matrix.cols - 1), xs[px + 1]],
    rows: [Math.min(ys[py], model.order.length - 1), ys[py + 1]],
  };
}
