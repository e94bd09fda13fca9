/**
 * The parallel groups on their canvas: a cell for each device, coloured by its rank's state.
 *
 * Input: a picture, the cells and the layout of mesh_layout.js, a value for each rank, marks,
 * and the chosen rank with its groups. Output: pixels.
 */

import { arrow } from "./axis.js";
import { begin, fitText, font } from "./canvas.js";
import { cividis, inkOn } from "./colours.js";

/** Return the box of the cells inside the picture, in CSS pixels. */
export function frame(picture) {
  return {
    left: picture.width < 560 ? 40 : 56,
    top: 6,
    right: picture.width - 6,
    bottom: picture.height - 8,
  };
}

/**
 * Draw all cells.
 * state: {part(rank) -> 0 to 1 or null, text(rank), marks: Map of rank to sign and colour}.
 */
export function drawMesh(picture, made, laid, state, picked, colours) {
  const ctx = begin(picture, "base");
  drawHeads(ctx, frame(picture), made, laid, colours);
  const gap = laid.width > 9 && laid.high > 9 ? 2 : laid.width > 4 && laid.high > 4 ? 1 : 0.5;
  const [width, high] = [laid.width - gap, laid.high - gap];
  const chosen = picked && new Set([...picked.groups.tp, ...picked.groups.dp, ...picked.groups.pp]);
  const isWide = width > 34 && high > 24;
  made.list.forEach((cell, index) => {
    const [x, y] = laid.at(cell);
    const part = state.part(cell.rank);
    ctx.globalAlpha = chosen && !chosen.has(index) ? 0.3 : 1;
    ctx.fillStyle = part === null ? colours.none : cividis(part);
    ctx.fillRect(x, y, width, high);
    if (!isWide) return;
    const isDim = ctx.globalAlpha < 1;
    ctx.globalAlpha = 1;
    drawText(ctx, cell, state, isDim ? null : part, x, y, width, high, colours);
  });
  ctx.globalAlpha = 1;
  for (const [rank, mark] of state.marks) {
    for (const index of made.byRank.get(rank) ?? [])
      drawMark(ctx, laid.at(made.list[index]), width, high, mark);
  }
  if (made.list.length <= 512) outlineRanks(ctx, made, laid, width, high, colours);
}

function drawHeads(ctx, box, made, laid, colours) {
  ctx.fillStyle = colours.muted;
  ctx.font = font(11, 650);
  const size = made.tp * laid.width;
  for (let band = 0; band < laid.bands; band += 1) {
    for (let p = 0; p < made.pp; p += 1) {
      const long = `stage ${p}`;
      ctx.textAlign = "left";
      const short = ctx.measureText(long).width > size + laid.gap - 3 ? `${p}` : long;
      ctx.fillText(fitText(ctx, short, size + laid.gap), laid.stage(p, band), box.top + 6);
    }
  }
  ctx.font = font(10.5);
  ctx.textAlign = "right";
  const every = Math.ceil(14 / laid.high);
  for (let row = 0; row < laid.rows; row += 1) {
    if (row % every) continue;
    ctx.fillText(
      `${box.left > 50 ? "dp " : ""}${row}`,
      box.left - 6,
      laid.top + (row + 0.5) * laid.high,
    );
  }
}

function drawText(ctx, cell, state, part, x, y, width, high, colours) {
  ctx.fillStyle = part === null ? colours.text : inkOn(part);
  ctx.textAlign = "left";
  ctx.font = font(11, 650);
  ctx.fillText(fitText(ctx, `rank ${cell.rank}`, width - 8) || `${cell.rank}`, x + 4, y + 10);
  ctx.font = font(10);
  const more = [state.text(cell.rank)];
  if (high > 38 && cell.device !== null) more.push(`device ${cell.device}`);
  more.forEach((text, index) => {
    if (y + 22 + 12 * index < y + high)
      ctx.fillText(fitText(ctx, text, width - 8), x + 4, y + 22 + 12 * index);
  });
}

function drawMark(ctx, [x, y], width, high, { sign, colour, ink }) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = 2;
  const out = Math.min(width, high) < 7 ? 1.5 : 0;
  ctx.strokeRect(x + 0.5 - out, y + 0.5 - out, width - 1 + 2 * out, high - 1 + 2 * out);
  ctx.lineWidth = 1;
  if (Math.min(width, high) < 9) return;
  const size = Math.min(14, Math.min(width, high) - 1);
  ctx.fillStyle = colour;
  ctx.fillRect(x + width - size, y, size, size);
  ctx.fillStyle = ink;
  ctx.textAlign = "center";
  ctx.font = font(size * 0.75, 700);
  ctx.fillText(sign, x + width - size / 2, y + size / 2 + 0.5);
}

/** Draw a frame around the devices of each process whose cells are adjacent. */
function outlineRanks(ctx, made, laid, width, high, colours) {
  ctx.strokeStyle = colours.text;
  ctx.globalAlpha = 0.45;
  for (const indices of made.byRank.values()) {
    if (indices.length < 2) continue;
    const places = indices.map((index) => laid.at(made.list[index]));
    const xs = places.map(([x]) => x);
    const ys = places.map(([, y]) => y);
    const [w, h] = [
      Math.max(...xs) + width - Math.min(...xs),
      Math.max(...ys) + high - Math.min(...ys),
    ];
    const isBlock = Math.abs(w * h - indices.length * laid.width * laid.high) < 0.35 * w * h;
    if (isBlock) ctx.strokeRect(Math.min(...xs) - 1.5, Math.min(...ys) - 1.5, w + 3, h + 3);
  }
  ctx.globalAlpha = 1;
}

/** Draw the upper layer: the chosen rank's groups and data flow, the cell under the cursor. */
export function drawAbove(picture, made, laid, picked, cursor, colours) {
  const ctx = begin(picture, "above");
  const gap = laid.width > 9 && laid.high > 9 ? 2 : laid.width > 4 && laid.high > 4 ? 1 : 0.5;
  const [width, high] = [laid.width - gap, laid.high - gap];
  const around = (index, colour, dash, wide, out) => {
    const [x, y] = laid.at(made.list[index]);
    ctx.strokeStyle = colour;
    ctx.lineWidth = wide;
    ctx.setLineDash(dash);
    ctx.strokeRect(x - out, y - out, width + 2 * out, high + 2 * out);
  };
  if (picked) {
    const isSmall = Math.min(width, high) < 8;
    const own = new Set(made.byRank.get(picked.rank) ?? []);
    for (const index of picked.groups.dp)
      if (!own.has(index)) around(index, colours.third, isSmall ? [] : [2, 3], isSmall ? 1 : 2, 0);
    for (const index of picked.groups.pp)
      if (!own.has(index)) around(index, colours.second, isSmall ? [] : [6, 3], isSmall ? 1 : 2, 0);
    for (const index of picked.groups.tp)
      if (!own.has(index)) around(index, colours.accent, [], isSmall ? 1 : 2, 0);
    ctx.setLineDash([]);
    for (const index of own) {
      around(index, colours.panel, [], 5, 1);
      around(index, colours.text, [], 3, 1);
    }
    drawFlow(ctx, made, laid, picked, width, high, colours);
  }
  ctx.setLineDash([]);
  if (cursor !== null) {
    around(cursor, "#0d141b", [], 3, 1);
    around(cursor, "#ffffff", [], 1.5, 1);
  }
}

/** Draw arrows to and from neighbouring stages: activations, and gradients (dashed). */
function drawFlow(ctx, made, laid, picked, width, high, colours) {
  const flow = (from, to, dash) => {
    const [[x0, y0], [x1, y1]] = [laid.at(made.list[from]), laid.at(made.list[to])];
    const forward = x1 > x0;
    const shift = high * (dash.length ? 0.72 : 0.32);
    ctx.strokeStyle = ctx.fillStyle = colours.second;
    ctx.lineWidth = 2;
    ctx.setLineDash(dash);
    arrow(ctx, forward ? x0 + width : x0, y0 + shift, forward ? x1 : x1 + width, y1 + shift, 7);
  };
  for (const index of made.byRank.get(picked.rank) ?? []) {
    const own = made.list[index];
    for (const other of picked.groups.pp) {
      const cell = made.list[other];
      if (cell.d !== own.d || cell.t !== own.t || Math.abs(cell.p - own.p) !== 1) continue;
      if (cell.p > own.p) {
        flow(index, other, []);
        flow(other, index, [4, 3]);
      } else {
        flow(other, index, []);
        flow(index, other, [4, 3]);
      }
    }
  }
  ctx.lineWidth = 1;
}
