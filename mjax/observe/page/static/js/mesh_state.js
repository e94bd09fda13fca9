/**
 * Colours and signs of the cells. Pure, except that `marksOf` reads the store.
 *
 * Input: the state of the ranks, the medians of a phase, the stuck and the slow ranks.
 * Output: scales {name, part(rank), text(rank), low, high}, in which part is the position on
 * the colour scale, 0 to 1 or null; and marks by rank.
 */

import { count, millis, plural, seconds, times as sayTimes } from "./format.js";
import { RATIO, matrix, rowMedians, valueOf } from "./heat_data.js";

/** Range of ages, log scale. From a fast step to far above a usual one. */
const AGE_S = [0.1, 100];
const MOST_LAG = 4;

/** Scale of the age of the last span: dark is fresh, bright is old. */
export function ageScale(rows) {
  const [low, high] = AGE_S.map(Math.log);
  return {
    name: "age",
    low: `${seconds(AGE_S[0])} ago`,
    high: `over ${seconds(AGE_S[1])} ago`,
    part: (rank) => {
      const age_s = rows.get(rank)?.age_s ?? null;
      return age_s === null ? null : unit((Math.log(Math.max(age_s, 1e-3)) - low) / (high - low));
    },
    text: (rank) => (rows.has(rank) ? seconds(rows.get(rank).age_s) : "no record"),
  };
}

/** Scale of the number of steps that a rank is behind the first rank. */
export function lagScale(rows) {
  const first = [...rows.values()].reduce((most, each) => Math.max(most, each.step), 0);
  return {
    name: "lag",
    low: `at step ${count(first)}`,
    high: `${plural(MOST_LAG, "step")} behind or more`,
    part: (rank) => (rows.has(rank) ? unit((first - rows.get(rank).step) / MOST_LAG) : null),
    text: (rank) => {
      if (!rows.has(rank)) return "no record";
      const lag = first - rows.get(rank).step;
      return lag ? `−${plural(lag, "step")}` : "in step";
    },
  };
}

/**
 * Return {phase, usual, byRank}: the median of each rank in an answer of /api/heat, and the
 * median over the ranks.
 */
export function phaseTimes(answer) {
  const made = matrix(answer);
  const medians = rowMedians(made);
  const byRank = new Map();
  made.ranks.forEach((rank, row) => {
    const value = valueOf(medians[row], made.lo, made.hi);
    if (value !== null) byRank.set(rank, value);
  });
  const sorted = [...byRank.values()].sort((a, b) => a - b);
  return { phase: made.phase, usual: sorted[sorted.length >> 1] ?? null, byRank };
}

/** Scale of the time of a phase relative to the median of all ranks. */
export function phaseScale(found) {
  if (!found?.usual)
    return { name: "phase", low: "", high: "", part: () => null, text: () => "no value" };
  const [low, high] = RATIO;
  return {
    name: "phase",
    low: millis(found.usual * low),
    high: `over ${millis(found.usual * high)}`,
    part: (rank) =>
      found.byRank.has(rank)
        ? unit((found.byRank.get(rank) / found.usual - low) / (high - low))
        : null,
    text: (rank) =>
      found.byRank.has(rank)
        ? `${millis(found.byRank.get(rank))}, ${sayTimes(found.byRank.get(rank) / found.usual)}`
        : "no value",
  };
}

function unit(value) {
  return Math.min(1, Math.max(0, value));
}

/** Return the sign of each rank that blocks others, has failed or is slow: the worst one. */
export function marksOf(store, run, colours) {
  const found = new Map();
  const bad = { colour: colours.bad, ink: colours.panel, name: "sev-error" };
  for (const outlier of store.get("stragglers")?.outliers ?? []) {
    for (const rank of outlier.ranks) {
      found.set(rank, {
        sign: "▲",
        says: "slow",
        colour: colours.warn,
        ink: colours.panel,
        name: "sev-warning",
      });
    }
  }
  for (const each of run?.ranks ?? []) {
    if (each.ended) found.set(each.rank, { ...bad, sign: "×", says: "ended with an error" });
  }
  const stuck = store.get("stuck");
  for (const rank of stuck?.is_stuck ? stuck.ranks : [])
    found.set(rank, { ...bad, sign: "!", says: "the others wait for it" });
  return found;
}
