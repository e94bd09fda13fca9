/**
 * Position of each device in the picture of the parallel groups. Pure.
 *
 * Input: sizes of the mesh axes, outermost first, and the devices of each rank. Output:
 * cells {rank, device, p, d, t} with the indices of stage, data-parallel replica and
 * tensor-parallel member; and the position of each cell in a box of pixels. A stage is a
 * column, a replica is a row, and the members of tp are side by side. If rows do not fit,
 * they continue in further bands to the right.
 */

const PP = "pp";
const TP = "tp";
const GAP = 14; // pixels between stages
const FEW = 65; // devices whose cells have room for text

/** Return the coordinate of a device on each axis. */
export function coordinates(device, mesh) {
  const found = {};
  let left = device;
  for (const axis of Object.keys(mesh).reverse()) {
    const size = Math.max(1, mesh[axis]);
    found[axis] = left % size;
    left = Math.floor(left / size);
  }
  return found;
}

/** Make the cells of a run. If no rank has devices, each gets one cell, in a column. */
export function cells(run) {
  const mesh = run.mesh ?? {};
  const found = [];
  for (const { rank, devices } of run.ranks) {
    for (const device of devices ?? []) {
      const at = coordinates(device, mesh);
      let d = 0;
      for (const axis of Object.keys(mesh)) {
        if (axis !== PP && axis !== TP) d = d * Math.max(1, mesh[axis]) + at[axis];
      }
      found.push({ rank, device, p: at[PP] ?? 0, d, t: at[TP] ?? 0 });
    }
  }
  if (!found.length)
    run.ranks.forEach(({ rank }, d) => found.push({ rank, device: null, p: 0, d, t: 0 }));
  const size = (key) => found.reduce((most, cell) => Math.max(most, cell[key] + 1), 1);
  return { list: found, pp: size("p"), dp: size("d"), tp: size("t"), byRank: byRank(found) };
}

function byRank(list) {
  const found = new Map();
  list.forEach((cell, index) => {
    if (!found.has(cell.rank)) found.set(cell.rank, []);
    found.get(cell.rank).push(index);
  });
  return found;
}

/**
 * Lay the cells out in a box {left, top, right, bottom}, as large as possible.
 * Returns {bands, rows, width, high, at(cell) -> [x, y], stage(p, band) -> x}: the number of
 * bands and of rows in each, the size of a cell, and positions in pixels.
 */
export function layout({ pp, dp, tp }, box) {
  const [most, widest] = pp * dp * tp < FEW ? [84, 320] : [46, 100];
  let best = null;
  const room = [box.right - box.left, box.bottom - box.top];
  for (let bands = 1; bands <= dp; bands += 1) {
    const rows = Math.ceil(dp / bands);
    const gaps = GAP * (bands * pp - 1) + GAP * (bands - 1);
    const width = Math.min((room[0] - gaps) / (bands * pp * tp), widest);
    const high = Math.min((room[1] - 16) / rows, most);
    const size = Math.min(width, high);
    if (width <= 0) break;
    if (!best || size > best.size * 1.05) best = { size, bands, rows, width, high };
  }
  best ??= {
    bands: 1,
    rows: dp,
    width: Math.max(1, room[0] / (pp * tp)),
    high: Math.max(1, room[1] / dp),
  };
  const { rows, width, high, bands } = best;
  const stageWidth = tp * width + GAP;
  const bandWidth = pp * stageWidth + GAP;
  const stage = (p, band) => box.left + band * bandWidth + p * stageWidth;
  return {
    bands,
    rows,
    width,
    high,
    stage,
    top: box.top + 16,
    gap: GAP,
    at: (cell) => [
      stage(cell.p, Math.floor(cell.d / rows)) + cell.t * width,
      box.top + 16 + (cell.d % rows) * high,
    ],
  };
}

/** Return the index of the cell at (x, y); null if there is none. */
export function cellAt(made, laid, { x, y }) {
  const index = made.list.findIndex((cell) => {
    const [left, top] = laid.at(cell);
    return x >= left && x < left + laid.width && y >= top && y < top + laid.high;
  });
  return index < 0 ? null : index;
}

/** Return the index of the cell dt columns to the right and dd rows below another. */
export function neighbour(made, index, dt, dd) {
  const from = made.list[index];
  const across = from.p * made.tp + from.t + dt;
  const [p, t, d] = [
    Math.floor(across / made.tp),
    ((across % made.tp) + made.tp) % made.tp,
    from.d + dd,
  ];
  const found = made.list.findIndex((cell) => cell.p === p && cell.t === t && cell.d === d);
  return found < 0 ? index : found;
}

/**
 * Return the groups of a rank's devices, {tp, dp, pp}, as sets of indices of cells.
 * A member of a group differs from a device of the rank only along the axes of that group.
 */
export function groupsOf(made, rank) {
  const own = (made.byRank.get(rank) ?? []).map((index) => made.list[index]);
  const found = { tp: new Set(), dp: new Set(), pp: new Set() };
  made.list.forEach((cell, index) => {
    for (const one of own) {
      const [p, d, t] = [cell.p === one.p, cell.d === one.d, cell.t === one.t];
      if (p && d) found.tp.add(index);
      if (p && t) found.dp.add(index);
      if (d && t) found.pp.add(index);
    }
  });
  return found;
}
