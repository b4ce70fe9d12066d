// The page: its state, requests to the server, keyboard, address.

import { Refused, get, post, useKey } from "./api.js";
import { Picker } from "./picker.js";
import { count, element, facts, fusedScale, legend, marks, meaning, number, row, same, scale, served, why } from "./view.js";

const PAUSE_MS = 90; // after the last key
const LONGEST_MS = 350; // while typing continues
const ADDRESS_CHARS = 2000; // longest query that is put into the address

const $ = (id) => document.getElementById(id);
const query = $("query");
const list = $("labels");
let card = null;
let answer = null; // what the list shows: {body, model, labels}
let opened = ""; // uid of the label whose "why" is open
let explained = null; // {body, ...answer of /explain}
let running = null;
let retry = 0;
let timer = 0;
let since = 0;

const changed = () => { filtersShown(); soon(0); };
const allow = new Picker($("allow"), changed);
const deny = new Picker($("deny"), changed);

// ---- state, request, address

const head = () => document.querySelector("input[name=head]:checked").value;
const wanted = () => Math.min(card?.limits?.max_k ?? 100, Math.max(1, Math.round(Number($("k").value)) || 10));
const least = () => ($("min").value.trim() === "" || !Number.isFinite($("min").valueAsNumber) ? null : $("min").valueAsNumber);

function filters() {
  const made = { k: wanted() };
  if (allow.labels.length) made.allow = allow.labels.map(({ uid }) => uid);
  if (deny.labels.length) made.deny = deny.labels.map(({ uid }) => uid);
  if (least() !== null) made.min_score = least();
  if (head() !== "both") made.head = head();
  return made;
}

function address() {
  const words = new URLSearchParams();
  const made = filters();
  if (query.value.trim() && query.value.length <= ADDRESS_CHARS) words.set("q", query.value);
  if (made.k !== 10) words.set("k", made.k);
  if (made.head) words.set("head", made.head);
  if (made.min_score !== undefined) words.set("min", made.min_score);
  for (const uid of made.allow ?? []) words.append("allow", uid);
  for (const uid of made.deny ?? []) words.append("deny", uid);
  const text = String(words);
  history.replaceState(null, "", text && text.length < 6000 ? `?${text}` : location.pathname);
}

function fromAddress() {
  const words = new URLSearchParams(location.search);
  query.value = words.get("q") ?? "";
  $("k").value = Number(words.get("k")) >= 1 ? Math.round(Number(words.get("k"))) : 10;
  $("min").value = words.get("min") ?? "";
  const ranked = document.querySelector(`input[name=head][value="${CSS.escape(words.get("head") ?? "both")}"]`) ?? $("head").querySelector("input");
  ranked.checked = true;
  for (const [picker, name] of [[allow, "allow"], [deny, "deny"]]) {
    picker.set([...new Set(words.getAll(name))].slice(0, 50).map((uid) => ({ uid, title: uid })));
    for (const label of picker.labels) named(label).then((found) => picker.rename(found));
  }
  filtersShown();
  grow();
}

async function named(label) {
  try {
    return await get(`labels/${encodeURIComponent(label.uid)}`);
  } catch (error) {
    return { ...label, unknown: error.kind === "wrong" };
  }
}

function filtersShown() {
  const { k, ...made } = filters();
  const active = Object.keys(made).length;
  $("active").textContent = `${active} on`;
  $("active").hidden = !active;
  $("reset").hidden = !active && k === 10;
}

// ---- requests for predictions

function soon(wait = PAUSE_MS) {
  clearTimeout(timer);
  clearTimeout(retry);
  since ||= performance.now();
  timer = setTimeout(ask, Math.max(0, Math.min(wait, since + LONGEST_MS - performance.now())));
}

async function ask() {
  since = 0;
  clearTimeout(retry);
  running?.abort();
  address();
  $("clear").hidden = !query.value;
  const text = query.value.trim();
  document.title = text ? `${text.slice(0, 60)} · unidec` : "unidec";
  if (!text) {
    running = null;
    showNothing();
    return;
  }
  const mine = (running = new AbortController());
  const body = { queries: [text.toWellFormed?.() ?? text], ...filters() };
  const begun = performance.now();
  list.setAttribute("aria-busy", "true");
  const slow = setTimeout(() => { list.classList.add("old"); $("status").textContent = "waiting …"; }, 400);
  try {
    const { model, predictions } = await post("predict", body, mine.signal);
    if (card?.model.sha256 !== model.sha256) await openCard();
    if (mine !== running) return;
    if (card.model.sha256 !== model.sha256) throw new Refused("The model is being replaced", [], "wait", 1);
    show({ body, model, ...predictions[0] }, performance.now() - begun);
  } catch (error) {
    if (error.name !== "AbortError" && mine === running) failed(error, ask);
  } finally {
    clearTimeout(slow);
    if (mine === running) list.removeAttribute("aria-busy");
  }
}

// The weights of this ranking: a head chosen alone has weight 1, the others none.
const weights = () => (answer.body.head ? { [answer.body.head]: 1 } : card.weights);
const fused = () => card.fused && !answer.body.head;

function show(found, milliseconds) {
  answer = found;
  alertShown(null);
  const held = document.activeElement?.closest?.("#labels li")?.dataset.uid;
  const range = fused() ? fusedScale(found.labels) : scale(found.labels, weights());
  same(list, found.labels.map((label, place) => row(label, place, weights(), range)));
  if (card.feedback) for (const [place, label] of found.labels.entries()) list.children[place].append(marks(label, judged.get(judgedKey(label.uid))));
  $("meaning").textContent = found.labels.length ? meaning(found.labels, fused()) : "";
  list.classList.remove("old");
  $("start").hidden = true;
  same($("legend"), found.labels.length ? legend(weights(), fused()) : []);
  $("legend").hidden = !found.labels.length;
  $("status").textContent = summary(found, milliseconds);
  code(found.body);
  if (held !== undefined) (item(held)?.querySelector(".row") ?? query).focus();
  if (opened && item(opened)) open(opened);
  else opened = "";
}

function summary({ labels, body, unknown_tokens: unknown }, milliseconds) {
  const words = [];
  if (labels.length) words.push(`${labels.length} of ${count(card.num_labels)} labels`);
  else words.push(Object.keys(body).length > 2 ? "No label passes these filters" : "No labels");
  const edges = card.score_quantiles;
  if (labels.length && edges?.length > 1 && !body.head && !body.allow && !body.deny) {
    const below = edges.filter((edge) => edge < labels[0].score).length / edges.length;
    words.push(`best score higher than for ${Math.round(100 * below)} % of validation queries`);
  }
  if (unknown) words.push(`${unknown} ${unknown === 1 ? "token" : "tokens"} of the query unknown to the model`);
  words.push(`${milliseconds < 10 ? milliseconds.toFixed(1) : Math.round(milliseconds)} ms`);
  return words.join(" · ");
}

function showNothing() {
  answer = null;
  opened = "";
  same(list, []);
  list.classList.remove("old");
  list.removeAttribute("aria-busy");
  $("legend").hidden = true;
  $("meaning").textContent = "";
  $("status").textContent = "";
  $("start").hidden = false;
  if ($("alert").dataset.kind === "wrong") alertShown(null);
  code({ queries: ["your text"], ...filters() });
}

function failed(error, again) {
  const known = error instanceof Refused;
  const shown = known ? error : new Refused("Error in this page", [String(error)], "wrong");
  if (!known) console.error(error);
  list.classList.add("old");
  $("start").hidden = true;
  $("status").textContent = "";
  alertShown(shown, again);
  if (shown.kind === "wait") retry = setTimeout(() => {
    if (document.hidden) document.addEventListener("visibilitychange", again, { once: true });
    else again();
  }, 1000 * shown.retry);
}

function alertShown(error, again) {
  const box = $("alert");
  if (error?.kind === "key" && box.dataset.kind === "key") {
    box.querySelector("b").textContent = error.title; // the field keeps what was typed
    return;
  }
  box.dataset.kind = error?.kind ?? "";
  box.className = error ? `alert ${error.kind}` : "";
  if (!error) {
    same(box, []);
    return;
  }
  const lines = error.lines.map((line) => element("p", {}, line));
  if (error.kind === "wait") lines.push(element("p", { class: "muted" }, `Retrying in ${error.retry} s.`));
  same(box, [element("b", {}, error.title), ...lines, ...(error.kind === "key" ? [keyForm(again)] : [])]);
}

function keyForm(again) {
  const field = element("input", { id: "key", type: "password", autocomplete: "off", "aria-label": "API key", placeholder: "API key", required: "" });
  const form = element("form", {}, field, element("button", { class: "quiet" }, "Use this key"), element("p", { class: "muted" },
    "It stays in this tab until the page is closed or reloaded."));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(field.value.trim());
    field.value = "";
    openCard().then(again).catch((error) => failed(error, again));
  });
  return form;
}

// ---- the card

async function openCard() {
  const before = card?.model.sha256;
  card = await get("card");
  if (before === card.model.sha256) return;
  same($("facts"), [...(before ? [element("p", {}, "The server has switched to this model since the page was opened.")] : []), ...facts(card)]);
  $("served").textContent = served(card);
  $("card").hidden = false;
  $("k").max = card.limits.max_k;
  query.maxLength = card.limits.max_query_chars;
  for (const input of $("head").querySelectorAll("input")) input.disabled = input.value !== "both" && !card.heads.includes(input.value);
  explained = null;
  const tries = (card.examples ?? []).map((text) => {
    const button = element("button", { type: "button" }, text);
    button.addEventListener("click", () => { query.value = text; grow(); query.focus(); soon(0); });
    return element("li", {}, button);
  });
  same($("start"), [element("p", { class: "muted" }, tries.length ? "Labels appear as you type. Or try one of these:" : "Labels appear as you type."),
    element("ul", {}, ...tries)]);
}

// ---- why

const item = (uid) => [...list.children].find((one) => one.dataset.uid === uid);

async function open(uid) {
  close();
  opened = uid;
  const place = item(uid);
  const button = place.querySelector(".row");
  const room = element("div", { class: "why", id: "why", role: "region", "aria-label": "why this label" }, element("p", { class: "muted" }, "waiting …"));
  button.setAttribute("aria-expanded", "true");
  button.setAttribute("aria-controls", "why");
  place.append(room);
  const { queries, ...rest } = answer.body;
  const body = { query: queries[0], ...rest };
  const label = answer.labels.find((one) => one.uid === uid);
  try {
    if (explained === null || JSON.stringify(explained.body) !== JSON.stringify(body)) explained = { body, ...(await post("explain", body)) };
    if (!room.isConnected) return;
    same(room, why(explained.labels.find((one) => one.uid === uid) ?? label, explained, card.fused && !explained.body.head));
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    same(room, [element("p", {}, `${error.title}. ${error.lines.join(" ")}`)]);
  }
}

function close() {
  opened = "";
  $("why")?.remove();
  for (const button of list.querySelectorAll(".row[aria-expanded=true]")) button.setAttribute("aria-expanded", "false");
}

function leaveOut(uid) {
  const rows = [...list.children];
  const next = rows[rows.indexOf(item(uid)) + 1] ?? rows.at(-2);
  if (list.contains(document.activeElement)) (next?.querySelector(".row") ?? query).focus();
  const label = answer.labels.find((one) => one.uid === uid);
  deny.add({ uid, title: label?.title ?? uid });
}

// ---- feedback

const judged = new Map(); // query and uid -> relevant, as sent to the server
const judgedKey = (uid) => JSON.stringify([answer.body.queries[0], uid]);

async function judge(button, uid) {
  const relevant = button.dataset.relevant === "true";
  const name = judgedKey(uid);
  try {
    await post("feedback", { query: answer.body.queries[0], label: uid, relevant });
    judged.set(name, relevant);
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
    $("status").textContent = "saved, thank you";
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    $("status").textContent = `${error.title}. ${error.lines.join(" ")}`;
  }
}

// ---- keyboard and pointer

list.addEventListener("click", (event) => {
  const place = event.target.closest("li[data-uid]");
  if (!place || event.target.closest(".why")) return;
  if (event.target.closest(".marks")) {
    if (event.target.closest("button")) judge(event.target.closest("button"), place.dataset.uid);
    return;
  }
  if (event.target.closest(".out")) leaveOut(place.dataset.uid);
  else if (opened === place.dataset.uid) close();
  else open(place.dataset.uid);
});

list.addEventListener("keydown", (event) => {
  const rows = [...list.querySelectorAll(".row")];
  const place = event.target.closest("li[data-uid]");
  const at = rows.indexOf(place?.querySelector(".row"));
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
  if (to !== undefined && event.target.closest(".row")) (rows[Math.min(to, rows.length - 1)] ?? query).focus();
  else if (event.key === "Delete" && event.target.closest(".row")) leaveOut(place.dataset.uid);
  else if (event.key === "Escape" && opened) { const last = item(opened); close(); last.querySelector(".row").focus(); }
  else if (event.key === "Escape") query.focus();
  else return;
  event.preventDefault();
  event.stopPropagation();
});

query.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  const atEnd = query.selectionStart === query.value.length || !query.value.includes("\n");
  if (event.key === "Enter" && !event.shiftKey) soon(0);
  else if (event.key === "ArrowDown" && atEnd && list.firstElementChild) list.querySelector(".row").focus();
  else if (event.key === "Escape" && query.value) { query.value = ""; grow(); soon(0); }
  else return;
  event.preventDefault();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea")) return;
  event.preventDefault();
  query.focus();
  query.select();
});

function grow() {
  query.style.height = "auto";
  query.style.height = `${query.scrollHeight + 2}px`;
  $("clear").hidden = !query.value;
}

query.addEventListener("input", () => { grow(); soon(); });
$("clear").addEventListener("click", () => { query.value = ""; grow(); query.focus(); soon(0); });
$("ask").addEventListener("submit", (event) => { event.preventDefault(); soon(0); });
$("filters").addEventListener("input", (event) => { if (!event.target.closest(".picker")) { filtersShown(); soon(); } });
$("k").addEventListener("change", () => { $("k").value = wanted(); });
$("reset").addEventListener("click", () => {
  allow.set([]);
  deny.set([]);
  $("k").value = 10;
  $("min").value = "";
  $("head").querySelector("input").checked = true;
  query.focus();
  changed();
});
addEventListener("popstate", () => { fromAddress(); soon(0); });

// ---- the request as a command, colours

function code(body) {
  const at = new URL("predict", document.baseURI).href;
  const key = card?.api_key ? " -H \"Authorization: Bearer $UNIDEC_API_KEY\"" : "";
  const text = JSON.stringify(body).replaceAll("'", "'\\''");
  $("curl").textContent = `curl -s ${at} -H 'Content-Type: application/json'${key} -d '${text}'`;
}

$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    $("copy").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren($("curl")); // no clipboard without https: the text is selected instead
    $("copy").textContent = "Selected: press Ctrl-C";
  }
  setTimeout(() => { $("copy").textContent = "Copy"; }, 2000);
});

const THEMES = { "": ["◐", "system"], light: ["☀", "light"], dark: ["☾", "dark"] };

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  const [sign, words] = THEMES[name];
  $("theme").textContent = sign;
  $("theme").setAttribute("aria-label", `colours: ${words}`);
  $("theme").title = `colours: ${words}`;
}

const kept = (name) => { try { return name === undefined ? localStorage.getItem("unidec-theme") : localStorage.setItem("unidec-theme", name); } catch { return null; } };
theme(kept() in THEMES ? kept() : "");
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  theme(next);
  kept(next);
});

// ---- start

if (matchMedia("(max-width: 900px)").matches) for (const id of ["filters", "card"]) $(id).open = false;
$("jump").addEventListener("click", () => { $("filters").open = true; });

async function start() {
  try {
    await openCard();
    await ask();
    document.documentElement.dataset.ready = "";
  } catch (error) {
    failed(error, start);
  }
}

fromAddress();
if (!matchMedia("(pointer: coarse)").matches) query.focus(); // a phone's keyboard would cover half of the page
start();
