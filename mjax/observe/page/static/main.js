/**
 * The page of a run: starts it, opens the view that the URL names, keeps its data fresh.
 *
 * Input: the server's answers and events. Output: the view in #main, the header, and the
 * three answers about health above the views. Each view is a module with
 * make(context) -> {element, show, hide}, which is called when the view is first opened.
 */

import { get } from "./js/api.js";
import { el, fill, say } from "./js/dom.js";
import { count, plural } from "./js/format.js";
import { showHealth } from "./js/health.js";
import { listen } from "./js/live.js";
import { appendMarks, appendMetrics, makeStore } from "./js/store.js";
import * as events from "./views/events.js";
import * as groups from "./views/groups.js";
import * as heat from "./views/heat.js";
import * as ledger from "./views/ledger.js";
import * as overview from "./views/overview.js";
import * as stuck from "./views/stuck.js";
import * as timeline from "./views/timeline.js";

const VIEWS = {
  overview: ["Overview", overview],
  heat: ["Heat map", heat],
  timeline: ["Timeline", timeline],
  groups: ["Groups", groups],
  events: ["Events", events],
  ledger: ["Ledger", ledger],
  stuck: ["Stuck", stuck],
};
const POINTS = 2000; // rows of metrics to request; more than a chart has pixels
/** Seconds between two requests of a part. The data are fresh, at little cost. */
const EVERY_S = { run: 15, stuck: 10, stragglers: 30, whatif: 60, ledger: 30 };

const AGAIN_MS = 1000; // until the server has read the files of the run once

const store = makeStore();
const made = {};
let shown = null;

const context = {
  store,
  refresh,
  go: (view, detail) => {
    if (detail !== undefined) context.detail = detail;
    if (location.hash === `#${view}`) open();
    else location.hash = view;
  },
  detail: null,
};

async function refresh(part, params = {}) {
  try {
    const answer = await get(part, params);
    store.set(part, answer);
    if (answer.is_complete === false) setTimeout(() => refresh(part, params), AGAIN_MS);
  } catch (error) {
    store.set(part, { ...(store.get(part) ?? {}), problem: error.message, failed: true });
    if (error.status === 401) showLink(false, "No access: open the URL with its token again");
  }
}

function open() {
  const wanted = location.hash.slice(1).split("?")[0];
  const name = Object.hasOwn(VIEWS, wanted) ? wanted : "overview";
  if (shown && shown !== name) made[shown].hide?.();
  made[name] ??= VIEWS[name][1].make(context);
  if (shown !== name) fill(document.getElementById("main"), made[name].element);
  shown = name;
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  showTitle();
  made[name].show?.();
}

function showTitle() {
  const run = store.get("run");
  document.title = `${VIEWS[shown ?? "overview"][0]} – ${run?.name || "mjax run"}`;
}

function showHeader(run) {
  if (!run || run.failed) return;
  say(document.getElementById("name"), run.name || "mjax run");
  const hosts = new Set(run.ranks.map((each) => each.host)).size;
  const mesh = Object.entries(run.mesh ?? {})
    .filter(([, size]) => size > 1)
    .map(([axis, size]) => `${axis} ${size}`)
    .join(" × ");
  const facts = [
    run.run ? `run ${run.run}` : run.is_complete ? "no run yet" : "loading",
    run.ranks.length ? `${plural(run.ranks.length, "rank")} on ${plural(hosts, "host")}` : "",
    mesh && `mesh ${mesh}`,
    run.generation ? `start ${count(run.generation)}` : "",
  ];
  say(document.getElementById("facts"), facts.filter(Boolean).join("  ·  "));
  const told = document.getElementById("told");
  told.hidden = !run.problems?.length;
  say(told, `▲ ${plural(run.problems?.length ?? 0, "problem")} with the records`);
  showTitle();
}

function showLink(isOpen, text = "") {
  const link = document.getElementById("link");
  link.classList.toggle("off", !isOpen);
  say(link, text || (isOpen ? "● live updates" : "▲ no updates; trying again"));
}

function start() {
  fill(
    document.getElementById("tabs"),
    Object.entries(VIEWS).map(([name, [title]]) => el("a", { href: `#${name}` }, title)),
  );
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  });
  store.on(["run"], showHeader);
  showHealth(document.getElementById("health"), context);
  window.addEventListener("hashchange", open);
  for (const [part, every_s] of Object.entries(EVERY_S)) {
    refresh(part);
    setInterval(() => document.hidden || refresh(part), every_s * 1000);
  }
  refresh("state");
  refresh("metrics", { points: POINTS });
  // The server sends new rows and marks by itself, but not thinned columns.
  setInterval(() => document.hidden || refresh("metrics", { points: POINTS }), 60_000);
  open();
  listen(
    {
      metrics: (rows) => {
        const metrics = store.get("metrics");
        if (metrics?.steps) store.set("metrics", appendMetrics(metrics, rows));
      },
      marks: (news) => {
        const metrics = store.get("metrics");
        if (metrics?.steps) store.set("metrics", appendMarks(metrics, news));
      },
      state: (state) => {
        store.set("state", state);
        if (state.live !== undefined && state.live !== store.get("run")?.live) refresh("run");
      },
      events: (rows) => store.set("newEvents", rows),
      run: () => {
        for (const part of Object.keys(EVERY_S)) refresh(part);
        refresh("metrics", { points: POINTS });
      },
    },
    showLink,
  );
}

start();
