/**
 * The cells of the heat map: rank x step, one byte each. Pure.
 *
 * Input: the answer of /api/heat, in which 255 is no value and 0 to 254 go from lo to hi.
 * Output: a matrix in which 0 is no value and 1 to 255 go from lo to hi, so that a larger
 * byte is a larger value; medians; and the pixels of any part of the matrix.
 *
 * If several cells share a pixel, it shows the largest, so that one slow rank among 4,096
 * stays visible.
 */

/** Range of ratios to the step's median. A difference of 4% is visible. */
export const RATIO = [0.8, 1.5];

/** Make the matrix of an answer. */
export function matrix({ header, cells }) {
  const bytes = new Uint8Array(cells.length);
  for (let at = 0; at < cells.length; at += 1) bytes[at] = cells[at] + 1; // 255 becomes 0
  return {
    ...header,
    max: header.most ?? header.hi,
    bytes,
    rows: header.ranks.length,
    cols: header.steps.length,
  };
}

/** Return the value of a byte on the scale from lo to hi; null if it has none. */
export function valueOf(byte, lo, hi) {
  return byte ? lo + ((byte - 1) / 254) * (hi - lo) : null;
}

function byteOf(value, lo, hi) {
  const part = hi > lo ? (value - lo) / (hi - lo) : 0;
  return 1 + Math.round(254 * Math.min(1, Math.max(0, part)));
}

/** Return the order of the rows: by host and rank, or by `keys`, the largest first. */
export function ordered({ ranks, hosts }, keys = null) {
  const order = Int32Array.from(ranks.keys());
  const most = 1 + ranks.reduce((a, b) => Math.max(a, b), 0);
  const byHost = new Map();
  ranks.forEach((rank, row) => {
    byHost.set(hosts[row], Math.min(rank, byHost.get(hosts[row]) ?? Infinity));
  });
  const first = Float64Array.from(
    ranks,
    (rank, row) => (keys ? -(keys[row] ?? -1) : byHost.get(hosts[row])) * most + (keys ? 0 : rank),
  );
  return order.sort((a, b) => first[a] - first[b] || ranks[a] - ranks[b]);
}

/** Return the consecutive rows of each host: [{host, from, to}]. */
export function hostBands({ hosts }, order) {
  const bands = [];
  order.forEach((row, place) => {
    const last = bands.at(-1);
    if (last && last.host === hosts[row]) last.to = place + 1;
    else bands.push({ host: hosts[row], from: place, to: place + 1 });
  });
  return bands;
}

function middle(counts, from) {
  let total = 0;
  for (let byte = 1; byte < 256; byte += 1) total += counts[from + byte];
  if (!total) return 0;
  let left = (total + 1) >> 1;
  for (let byte = 1; byte < 256; byte += 1) {
    left -= counts[from + byte];
    if (left <= 0) return byte;
  }
  return 255;
}

/** Return the median byte of each column. */
export function stepMedians({ bytes, rows, cols }) {
  const counts = new (rows < 65536 ? Uint16Array : Uint32Array)(cols * 256);
  for (let row = 0, at = 0; row < rows; row += 1) {
    for (let col = 0; col < cols; col += 1, at += 1) counts[col * 256 + bytes[at]] += 1;
  }
  return Uint8Array.from({ length: cols }, (_, col) => middle(counts, col * 256));
}

/** Return the median byte of each row, over some columns. */
export function rowMedians({ bytes, rows, cols }, from = 0, to = cols) {
  const counts = new Uint32Array(256);
  const found = new Uint8Array(rows);
  for (let row = 0; row < rows; row += 1) {
    counts.fill(0);
    for (let at = row * cols + from; at < row * cols + to; at += 1) counts[bytes[at]] += 1;
    found[row] = middle(counts, 0);
  }
  return found;
}

/** Return the mean byte of each row, over some columns; 0 where there is no value. */
export function rowMeans({ bytes, rows, cols }, from = 0, to = cols) {
  const found = new Float64Array(rows);
  for (let row = 0; row < rows; row += 1) {
    let [sum, num] = [0, 0];
    for (let at = row * cols + from; at < row * cols + to; at += 1) {
      sum += bytes[at];
      num += bytes[at] ? 1 : 0;
    }
    found[row] = num ? sum / num : 0;
  }
  return found;
}

/**
 * Return [over, num]: the number of columns in which a row is at least `factor` times the
 * step's median, and the number in which it has a value.
 */
export function timesOver({ bytes, cols, lo, hi }, medians, row, from, to, factor) {
  let [over, num] = [0, 0];
  for (let col = from; col < to; col += 1) {
    const byte = bytes[row * cols + col];
    if (!byte) continue;
    num += 1;
    if (valueOf(byte, lo, hi) >= factor * valueOf(medians[col], lo, hi)) over += 1;
  }
  return [over, num];
}

/** Return the cells as ratios to the median of their step, as bytes on the scale RATIO. */
export function relative(of, medians) {
  const { bytes, rows, cols, lo, hi } = of;
  const found = new Uint8Array(bytes.length);
  const tables = new Uint8Array(256 * 256); // by median and byte; few steps differ in both
  for (const median of new Set(medians)) {
    const usual = valueOf(median, lo, hi);
    for (let byte = 1; byte < 256 && usual > 0; byte += 1) {
      tables[median * 256 + byte] = byteOf(valueOf(byte, lo, hi) / usual, ...RATIO);
    }
  }
  for (let row = 0, at = 0; row < rows; row += 1) {
    for (let col = 0; col < cols; col += 1, at += 1) {
      found[at] = tables[medians[col] * 256 + bytes[at]];
    }
  }
  return found;
}

/**
 * Append the columns of a newer matrix, on the scale of the older one. Beyond `most`
 * columns the oldest are dropped. Returns the matrix with two more fields: `fresh`, the new
 * columns alone, and `drop`, the number of dropped columns. Returns null if the ranks differ
 * or steps are missing between the two; the whole matrix must then be requested.
 */
export function appended(old, more, most) {
  const same = old.rows === more.rows && old.ranks.every((rank, row) => rank === more.ranks[row]);
  if (!same || !more.cols || more.steps[0] !== old.steps.at(-1) + 1) return null;
  const table = Uint8Array.from({ length: 256 }, (_, byte) =>
    byte ? byteOf(valueOf(byte, more.lo, more.hi), old.lo, old.hi) : 0,
  );
  const fresh = { ...more, lo: old.lo, hi: old.hi, bytes: more.bytes.map((byte) => table[byte]) };
  const drop = Math.max(0, old.cols + more.cols - most);
  return {
    ...old,
    bytes: joined(old.bytes, fresh.bytes, old.rows, drop),
    cols: old.cols - drop + more.cols,
    steps: old.steps.slice(drop).concat(more.steps),
    max: Math.max(old.max, more.max),
    fresh,
    drop,
  };
}

/** Append columns to each row, and drop its first `drop` columns. */
export function joined(bytes, more, rows, drop) {
  const [cols, news] = [bytes.length / rows, more.length / rows];
  const width = cols - drop + news;
  const found = new Uint8Array(rows * width);
  for (let row = 0; row < rows; row += 1) {
    found.set(bytes.subarray(row * cols + drop, (row + 1) * cols), row * width);
    for (let col = 0; col < news; col += 1)
      found[(row + 1) * width - news + col] = more[row * news + col];
  }
  return found;
}

/** Return the first cell of each of `num` pixels, and the end of the last pixel. */
export function edges([begin, end], num, most) {
  const found = new Int32Array(num + 1);
  for (let pixel = 0; pixel <= num; pixel += 1) {
    const at = Math.floor(begin + ((end - begin) * pixel) / num);
    found[pixel] = Math.min(Math.max(at, 0), most);
  }
  return found;
}

/**
 * Draw a part of the matrix; each pixel shows its largest cell.
 * view: {x: range of columns, y: range of positions in `order`}; lut: pixel of each byte;
 * out: Uint32Array [height * width].
 */
export function pool(bytes, cols, order, view, width, height, lut, out) {
  const xs = edges(view.x, width, cols);
  const ys = edges(view.y, height, order.length);
  const line = new Uint8Array(width);
  let drawn = [-1, -1];
  for (let y = 0; y < height; y += 1) {
    const from = Math.min(ys[y], order.length - 1);
    const to = Math.max(ys[y + 1], from + 1);
    const at = y * width;
    if (from === drawn[0] && to === drawn[1]) {
      out.copyWithin(at, at - width, at);
      continue;
    }
    line.fill(0);
    for (let place = from; place < to; place += 1) {
      widest(bytes, order[place] * cols, xs, width, cols, line);
    }
    for (let x = 0; x < width; x += 1) out[at + x] = lut[line[x]];
    drawn = [from, to];
  }
}

function widest(bytes, base, xs, width, cols, line) {
  for (let x = 0; x < width; x += 1) {
    let most = line[x];
    let col = xs[x] < cols ? xs[x] : cols - 1;
    const end = xs[x + 1];
    do {
      const byte = bytes[base + col];
      if (byte > most) most = byte;
      col += 1;
    } while (col < end);
    line[x] = most;
  }
}

/** Return the largest cell in ranges of positions and columns: {row, col, byte}. */
export function largest(bytes, cols, order, [row0, row1], [col0, col1]) {
  let best = { row: order[row0], col: col0, byte: -1 };
  for (let place = row0; place < Math.max(row1, row0 + 1); place += 1) {
    for (let col = col0; col < Math.max(col1, col0 + 1); col += 1) {
      const byte = bytes[order[place] * cols + col];
      if (byte > best.byte) best = { row: order[place], col, byte };
    }
  }
  return best;
}
