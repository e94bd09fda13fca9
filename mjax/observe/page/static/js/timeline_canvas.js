/**
 * The timeline on its canvas: a row for each stream, a colour for each kind of span.
 *
 * Input: a picture, a model of timeline_data.js and a view {x, top}: the range of time in
 * microseconds, and the pixels scrolled down. Output: pixels; the row at a position; the
 * number of arrows drawn.
 */

import { arrow, axisBelow, line } from "./axis.js";
import { BACKWARD, INK, KIND_COLOURS } from "./colours.js";
import { begin, fitText, font } from "./canvas.js";
import { micros } from "./format.js";
import { scale } from "./range.js";
import { firstFrom } from "./timeline_data.js";

const ROW = [15, 24]; // smallest and largest height in pixels; text fits into both
const ARROWS = 200; // maximum number; more cannot be told apart
const ARROW_ROOM = 22; // minimum mean width of a sending span in pixels; narrower: no arrows

/** Return the box of the rows, the height of one, and the height that does not fit. */
export function frame(picture, model) {
  const left = picture.width < 640 ? 112 : 196;
  const [top, bottom] = [20, picture.height - 22];
  const size = Math.min(Math.max((bottom - top) / Math.max(1, model.rows.length), ROW[0]), ROW[1]);
  return {
    left,
    top,
    right: picture.width - 2,
    bottom,
    size: Math.floor(size),
    hidden: Math.max(0, Math.floor(size) * model.rows.length - (bottom - top)),
  };
}

/** Draw the picture; return {arrows, of}: the numbers of arrows drawn and in view. */
export function drawTimeline(picture, model, view, colours) {
  const ctx = begin(picture, "base");
  const box = frame(picture, model);
  const at = scale(view.x, [box.left, box.right]);
  const first = Math.max(0, Math.floor(view.top / box.size));
  const last = Math.min(model.rows.length, Math.ceil((view.top + box.bottom - box.top) / box.size));
  ctx.save();
  ctx.beginPath();
  ctx.rect(0, box.top, picture.width, box.bottom - box.top);
  ctx.clip();
  for (let index = first; index < last; index += 1) {
    drawRow(ctx, box, model, index, yOf(box, view, index), at, view, colours);
  }
  drawMarks(ctx, box, model, view, at, colours);
  const drawn = drawArrows(ctx, box, model, view, at, [first, last], colours);
  drawLabels(ctx, box, model, view, [first, last], colours);
  ctx.restore();
  drawSteps(ctx, box, model, at, colours);
  axisBelow(ctx, view.x, at, box, colours, (value) => micros(value), 100);
  ctx.strokeStyle = colours.line;
  ctx.strokeRect(box.left - 0.5, box.top - 0.5, box.right - box.left + 1, box.bottom - box.top + 1);
  return drawn;
}

function yOf(box, view, index) {
  return box.top + index * box.size - view.top;
}

/** Colour of a span: by kind, and darker for a backward pass or slot, such as B2a. */
export function colourOf(name, kind) {
  const isBackward = kind === "compute" && /^(backward$|B\d)/.test(name);
  return isBackward ? BACKWARD : (KIND_COLOURS[kind] ?? KIND_COLOURS.host);
}

function drawRow(ctx, box, { rows, spans, names, kinds }, index, y, at, view, colours) {
  const row = rows[index];
  const high = box.size - 3;
  const isStep = row.stream === "step";
  let taken = -Infinity;
  ctx.font = font(10.5);
  ctx.textAlign = "left";
  for (let place = firstFrom(row, view.x[0]); place < row.order.length; place += 1) {
    const span = row.order[place];
    if (spans.start_us[span] > view.x[1]) break;
    const x0 = Math.max(at(spans.start_us[span]), box.left);
    const x1 = Math.min(at(spans.end_us[span]), box.right);
    if (x1 < x0 || x1 <= taken) continue; // its pixel is drawn already
    const [name, kind] = [names[spans.name[span]], kinds[spans.kind[span]]];
    const width = Math.max(x1 - x0, 1);
    if (isStep) {
      ctx.strokeStyle = colours.muted;
      ctx.strokeRect(x0 + 0.5, y + 2.5, Math.max(width - 1, 1), high - 1);
    } else {
      ctx.fillStyle = colourOf(name, kind);
      ctx.fillRect(x0, y + 2, width - (width > 3 ? 0.6 : 0), high);
      if (kind === "idle" && width > 4) hatch(ctx, x0, y + 2, width, high);
    }
    if (width < 2) taken = Math.ceil(x1);
    if (width > Math.min(30, 10 + 7 * name.length)) {
      ctx.fillStyle = isStep ? colours.muted : INK;
      const size = micros(spans.end_us[span] - spans.start_us[span]);
      const title = isStep ? `step ${spans.step[span]}` : name;
      const long = width > 70 ? `${title}  ${size}` : title;
      ctx.fillText(fitText(ctx, long, width - 6), x0 + 4, y + 2 + high / 2 + 0.5);
    }
  }
}

function hatch(ctx, x, y, width, high) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, width, high);
  ctx.clip();
  ctx.strokeStyle = "#8a96a3";
  for (let at = x - high; at < x + width; at += 6) line(ctx, at, y + high, at + high, y);
  ctx.restore();
}

const MARK = { error: ["■", "bad"], warning: ["▲", "warn"], info: ["●", "accent"] };

/** Draw the signs of events in the first row of their rank, or in the first row of all. */
function drawMarks(ctx, box, model, view, at, colours) {
  ctx.font = font(11, 700);
  ctx.textAlign = "center";
  for (const mark of model.marks ?? []) {
    const x = at(mark.time_us);
    if (x < box.left || x > box.right) continue;
    const index = Math.max(
      0,
      model.rows.findIndex((row) => row.rank === mark.rank),
    );
    const [sign, name] = MARK[mark.severity] ?? MARK.info;
    const y = yOf(box, view, index) + box.size / 2;
    ctx.fillStyle = colours.panel;
    ctx.fillRect(x - 7, y - 7, 14, 14);
    ctx.fillStyle = colours[name];
    ctx.fillText(sign, x, y);
  }
}

function ends(box, { spans }, view, at, sent, received) {
  const there = Math.min(
    Math.max(spans.end_us[sent], spans.start_us[received]),
    spans.end_us[received],
  );
  return [
    at(spans.end_us[sent]),
    yOf(box, view, spans.row[sent]) + box.size / 2,
    at(there),
    yOf(box, view, spans.row[received]) + box.size / 2,
  ];
}

function drawArrows(ctx, box, model, view, at, [first, last], colours) {
  const inSight = model.arrows.filter(([sent, received]) => {
    const rows = [model.spans.row[sent], model.spans.row[received]];
    return (
      model.spans.end_us[sent] >= view.x[0] &&
      model.spans.start_us[received] <= view.x[1] &&
      Math.max(...rows) >= first &&
      Math.min(...rows) < last
    );
  });
  const room =
    inSight.reduce(
      (sum, [sent]) => sum + at(model.spans.end_us[sent]) - at(model.spans.start_us[sent]),
      0,
    ) / (inSight.length || 1);
  const isLegible = inSight.length <= ARROWS && room >= ARROW_ROOM;
  if (!isLegible) return { arrows: 0, of: inSight.length };
  for (const [sent, received] of inSight) {
    const isDown = model.spans.row[received] > model.spans.row[sent];
    ctx.strokeStyle = ctx.fillStyle = isDown ? colours.text : colours.third;
    ctx.setLineDash(isDown ? [] : [4, 3]);
    ctx.globalAlpha = 0.6;
    const line_ = ends(box, model, view, at, sent, received);
    if (line_[0] < box.left || line_[2] < box.left) continue;
    arrow(ctx, ...line_, 5);
  }
  ctx.globalAlpha = 1;
  ctx.setLineDash([]);
  return { arrows: inSight.length, of: inSight.length };
}

function drawLabels(ctx, box, model, view, [first, last], colours) {
  const isNarrow = box.left < 150;
  let own = 0;
  for (let index = 0; index < last; index += 1) {
    const row = model.rows[index];
    own = index && model.rows[index - 1].rank === row.rank ? own + 1 : 0;
    if (index < first) continue;
    const y = yOf(box, view, index);
    const middle = y + box.size / 2;
    if (own === 0 && index) {
      ctx.strokeStyle = colours.line;
      line(ctx, 0, Math.round(y) + 0.5, box.right, Math.round(y) + 0.5);
    }
    ctx.fillStyle = colours.muted;
    ctx.textAlign = "right";
    ctx.font = font(10.5);
    ctx.fillText(streamName(row.stream, isNarrow), box.left - 6, middle);
    ctx.textAlign = "left";
    const room = box.left - (isNarrow ? 50 : 70);
    if (own === 0) {
      ctx.font = font(11, 650);
      ctx.fillStyle = colours.text;
      ctx.fillText(fitText(ctx, `rank ${row.rank}`, room), 2, middle);
      const used = ctx.measureText(`rank ${row.rank}`).width + 8;
      ctx.font = font(11);
      ctx.fillText(fitText(ctx, row.host, room - used), 2 + used, middle);
    } else if (own === 1) {
      ctx.font = font(10.5);
      const isBounded = row.bound_us !== null;
      ctx.fillStyle = isBounded ? colours.muted : colours.warn;
      ctx.fillText(fitText(ctx, boundText(row.bound_us, isNarrow), room), 2, middle);
    }
  }
}

/** Return the error bound of a rank's clock as text. */
export function boundText(bound_us, isShort = false) {
  if (bound_us === null) return isShort ? "▲ no bound" : "▲ clock not bounded";
  if (bound_us === 0) return isShort ? "reference" : "clock: reference";
  return `${isShort ? "" : "clock "}± ${micros(bound_us)}`;
}

function streamName(stream, isShort) {
  const name = stream.replace("device:", "device ");
  return isShort ? name.replace("device ", "dev ") : name;
}

function drawSteps(ctx, box, { steps }, at, colours) {
  ctx.font = font(11);
  ctx.textAlign = "left";
  let free = box.left;
  for (const [step, start] of steps) {
    const x = Math.round(at(start)) + 0.5;
    if (x > box.right) continue;
    if (x >= box.left) {
      ctx.strokeStyle = colours.muted;
      ctx.setLineDash([2, 3]);
      line(ctx, x, box.top - 14, x, box.bottom);
      ctx.setLineDash([]);
    }
    if (x + 4 < free) continue;
    ctx.fillStyle = colours.muted;
    const text = `step ${step}`;
    ctx.fillText(text, Math.max(x + 4, box.left + 2), box.top - 9);
    free = Math.max(x + 4, box.left) + ctx.measureText(text).width + 10;
  }
}

/** Draw the upper layer: the hovered span, and the chosen one with the spans it waits for. */
export function drawAbove(picture, model, view, { hovered, picked, waits, dragged }, colours) {
  const ctx = begin(picture, "above");
  const box = frame(picture, model);
  const at = scale(view.x, [box.left, box.right]);
  ctx.beginPath();
  ctx.rect(box.left, box.top, box.right - box.left, box.bottom - box.top);
  ctx.clip();
  const outline = (span, colour, width) => {
    const [x0, x1] = [at(model.spans.start_us[span]), at(model.spans.end_us[span])];
    ctx.strokeStyle = colour;
    ctx.lineWidth = width;
    ctx.strokeRect(
      x0 - 0.5,
      yOf(box, view, model.spans.row[span]) + 1.5,
      Math.max(x1 - x0, 2) + 1,
      box.size - 2,
    );
  };
  if (hovered !== null) outline(hovered, colours.text, 1.5);
  if (picked !== null) {
    for (const each of waits) {
      outline(each.span, colours.bad, 2);
      ctx.strokeStyle = ctx.fillStyle = colours.bad;
      arrow(ctx, ...ends(box, model, view, at, each.span, picked), 8);
    }
    outline(picked, colours.text, 3);
  }
  if (dragged) {
    ctx.fillStyle = colours.accent;
    ctx.globalAlpha = 0.2;
    ctx.fillRect(
      Math.min(...dragged),
      box.top,
      Math.abs(dragged[1] - dragged[0]),
      box.bottom - box.top,
    );
    ctx.globalAlpha = 1;
  }
}

/** Return the index of the row at (x, y); null outside of the rows. */
export function rowAt(picture, model, view, { x, y }) {
  const box = frame(picture, model);
  if (y < box.top || y > box.bottom || x < box.left) return null;
  const index = Math.floor((y - box.top + view.top) / box.size);
  return index < model.rows.length ? index : null;
}
