/**
 * Stuck: one sentence that names the ranks that block the run, then the evidence.
 *
 * Input: the part stuck of the store, as `mjax.observe stuck --json` prints it. Output: the
 * sentence, the waiting ranks, stacks, and the last sign of life of each rank.
 */

import { button, el, empty, fill, table } from "../js/dom.js";
import { redrawer } from "../js/draws.js";
import { count, plural, ranks, seconds } from "../js/format.js";
import { problemList } from "./ledger.js";

// Ranks in the table; ranks to blame come first, then the most silent; not measured.
const SHOWN = 60;
const STATES = {
  R: "runs",
  S: "sleeps",
  D: "waits for a disk",
  T: "stopped",
  t: "traced",
  gone: "gone",
  "?": "not known here",
};

/** Make the view. */
export function make(context) {
  const { store, refresh } = context;
  const answer = el("div", {});
  const when = el("p", { class: "muted", role: "status" });
  const again = button("Ask again", async () => {
    await refresh("stuck");
  });
  const element = el(
    "div",
    {},
    el(
      "section",
      { class: "panel", "aria-label": "Answer" },
      answer,
      el("div", { class: "controls" }, again, when),
    ),
  );
  const evidence = el("div", {});
  element.append(evidence);
  let visible = false;
  const draw = redrawer("stuck", () => {
    if (!visible) return false;
    const found = store.get("stuck");
    showAnswer(answer, found);
    if (found && !found.problem) showEvidence(evidence, found, context);
    else fill(evidence);
    when.textContent = found
      ? `asked at ${new Date().toLocaleTimeString("en-GB")}, every 10 s`
      : "";
    return true;
  });
  store.on(["stuck"], () => draw("live"));
  return {
    element,
    show() {
      visible = true;
      draw("first");
    },
    hide() {
      visible = false;
    },
  };
}

/** Return the verdict in one sentence. Pure. */
export function sentence(found) {
  if (!found.is_stuck) {
    const told = found.reason ? found.reason[0].toUpperCase() + found.reason.slice(1) : "Not stuck";
    if (found.seen.every((each) => each.code !== null)) return `${told}.`;
    const oldest = [...found.seen].sort((a, b) => (b.age_s ?? Infinity) - (a.age_s ?? Infinity))[0];
    if (!oldest) return `${told}.`;
    return (
      `${told}. The oldest sign of life is that of rank ${oldest.rank} (phase ${oldest.phase}, ` +
      `step ${count(oldest.step)}): ${oldest.age_s === null ? "never" : `${seconds(oldest.age_s)} ago`}.`
    );
  }
  if (!found.ranks.length) return `Stuck, and no rank stands out: ${found.reason}.`;
  const many = found.ranks.length > 1;
  const where = found.hosts.length ? ` on ${found.hosts.slice(0, 3).join(", ")}` : "";
  return (
    `${many ? "Ranks" : "Rank"} ${ranks(found.ranks)}${where} ${many ? "hold" : "holds"} up the run ` +
    `(phase ${found.phase}, step ${count(found.step)}): ${found.reason}.`
  );
}

function showAnswer(box, found) {
  if (!found)
    return fill(box, empty("Asking", "The server compares the last signs of life of all ranks."));
  if (found.problem) return fill(box, empty("Nothing to judge yet", found.problem));
  const level = found.is_stuck ? "bad" : "good";
  return fill(
    box,
    el(
      "p",
      { class: `verdict ${level}` },
      el("span", { "aria-hidden": "true" }, found.is_stuck ? "■ " : "● "),
      sentence(found),
    ),
  );
}

function showEvidence(box, found, { go }) {
  const blamed = new Set(found.ranks);
  const seen = [...found.seen].sort(
    (a, b) =>
      blamed.has(b.rank) - blamed.has(a.rank) || (b.age_s ?? Infinity) - (a.age_s ?? Infinity),
  );
  const waiting = Object.entries(found.groups ?? {});
  const shown = seen.slice(0, SHOWN);
  fill(
    box,
    problemList(found.problems),
    waiting.length
      ? el(
          "section",
          { class: "panel", "aria-label": "Who waits" },
          el("h2", {}, "Who waits for them"),
          el(
            "dl",
            {},
            waiting.map(([axis, list]) => [
              el("dt", {}, axis),
              el("dd", {}, `${list.length > 1 ? "ranks" : "rank"} ${ranks(list, 12)}`),
            ]),
          ),
        )
      : null,
    Object.entries(found.stacks ?? {}).map(([rank, text]) =>
      el(
        "section",
        { class: "panel", "aria-label": `Stacks of rank ${rank}` },
        el("h2", {}, `Stacks of rank ${rank}`),
        el(
          "pre",
          { tabindex: "0", role: "region", "aria-label": `Stacks of rank ${rank}, text` },
          text,
        ),
      ),
    ),
    el(
      "section",
      { class: "panel", "aria-label": "Last signs of life" },
      el("h2", {}, "Last signs of life"),
      table(
        seen.length > SHOWN
          ? `The ${SHOWN} oldest of ${plural(seen.length, "rank")}`
          : plural(seen.length, "rank"),
        [
          {
            head: "rank",
            num: true,
            cell: (row) =>
              button(`${row.rank}`, () => go("groups", { rank: row.rank }), {
                class: "linkish",
                "aria-label": `rank ${row.rank}: show it among its groups`,
              }),
          },
          { head: "host", cell: (row) => row.host ?? "not known" },
          { head: "phase", cell: (row) => row.phase },
          { head: "step", num: true, cell: (row) => count(row.step) },
          {
            head: "age",
            num: true,
            cell: (row) => (row.age_s === null ? "never seen" : seconds(row.age_s)),
          },
          { head: "process", cell: (row) => STATES[row.state] ?? row.state },
          { head: "exit code", num: true, cell: (row) => row.code ?? "–" },
          {
            head: "verdict",
            cell: (row) => (blamed.has(row.rank) ? "■ the others wait for it" : "–"),
          },
        ],
        shown,
        (row) => ({ class: blamed.has(row.rank) ? "picked" : null }),
      ),
    ),
  );
}
