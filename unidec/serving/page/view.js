// Rendering. Every text from the server is inserted as text, never as HTML.

export const PARTS = [
  { name: "de", title: "dual encoder", meaning: "similarity of the label's text and the query" },
  { name: "clf", title: "classifier", meaning: "score by the label's own trained vector" },
  { name: "knn", title: "votes", meaning: "share of votes of the nearest training queries" },
];

export function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== "" && child !== null && child !== undefined));
  return made;
}

export const same = (parent, children) => parent.replaceChildren(...children);

export const number = (value, digits = 3) => (Number.isFinite(value) ? value.toFixed(digits).replace("-", "−") : "");
export const percent = (share) => (share < 0.01 ? "< 1 %" : share > 0.99 ? "> 99 %" : `${Math.round(100 * share)} %`);
export const count = (value) => value.toLocaleString("en-GB");

// What each part adds to a label's score: weight times part, for the parts that the model has.
export const addends = (label, weights) => PARTS.filter(({ name }) => Number.isFinite(label[name]) && weights[name])
  .map((part) => ({ ...part, part: label[part.name], weight: weights[part.name], adds: label[part.name] * weights[part.name] }));

// Bars of all labels share one scale: from the lowest sum of negative addends (or 0) to the highest sum of positive ones.
export function scale(labels, weights) {
  let low = 0;
  let high = 1e-9;
  for (const label of labels) {
    const all = addends(label, weights).map(({ adds }) => adds);
    low = Math.min(low, all.filter((x) => x < 0).reduce((a, b) => a + b, 0));
    high = Math.max(high, all.filter((x) => x > 0).reduce((a, b) => a + b, 0));
  }
  return { low, high };
}

// A learnt fusion ranks by its own score, a logit, not by the sum of the parts: one bar, the label's probability as a share
// of the list's best; without calibration the logit's sigmoid takes its place.
const chance = ({ probability, score }) => (Number.isFinite(probability) ? probability : 1 / (1 + Math.exp(-score)));
export const fusedScale = (labels) => ({ best: Math.max(1e-9, ...labels.map(chance)) });

function fusedBar(label, { best }) {
  const piece = element("i", { class: "fused" });
  piece.style.left = "0%";
  piece.style.width = `${(100 * chance(label)) / best}%`;
  return element("span", { class: "bar", "aria-hidden": "true" }, piece);
}

function bar(label, weights, range) {
  return range.best === undefined ? partsBar(label, weights, range) : fusedBar(label, range);
}

function partsBar(label, weights, { low, high }) {
  const chart = element("span", { class: "bar", "aria-hidden": "true" });
  const percent = (x) => `${(100 * x) / (high - low)}%`;
  const zero = -low;
  let [left, right] = [zero, zero];
  for (const { name, adds } of addends(label, weights)) {
    const piece = element("i", { class: name });
    if (adds < 0) left += adds;
    piece.style.left = percent(adds < 0 ? left : right);
    piece.style.width = percent(Math.abs(adds));
    if (adds >= 0) right += adds;
    chart.append(piece);
  }
  if (low < 0) {
    const line = element("b", { class: "zero" });
    Object.assign(line.style, { position: "absolute", left: percent(zero) });
    chart.append(line);
  }
  return chart;
}

const LIKELY = "probability that this label is relevant: the share of relevant labels among those with a similar score, on the validation split";

// A row: a button that opens "why", and one that excludes the label.
export function row(label, place, weights, range) {
  const parts = addends(label, weights).map(({ title, adds }) => `${title} ${number(adds)}`).join(", ");
  const named = label.title || label.uid;
  const likely = Number.isFinite(label.probability) ? percent(label.probability) : "";
  const shownUid = label.title && !label.title.startsWith(label.uid);
  const button = element("button", {
    type: "button", class: "row", "aria-expanded": "false", "aria-label": `${place + 1}. ${named}, score ${number(label.score)}${likely && `, relevant with a probability of ${likely}`}: ${parts}`,
  },
    element("span", { class: "rank" }, String(place + 1)),
    element("span", { class: "title" }, named, shownUid ? element("small", {}, ` ${label.uid}`) : ""),
    element("span", { class: "score" }, number(label.score), likely && element("small", { title: LIKELY }, likely)),
    bar(label, weights, range));
  const out = element("button", { type: "button", class: "out quiet", "aria-label": `exclude ${named}`, title: "exclude this label", tabindex: "-1" }, "×");
  const item = element("li", {}, button, out);
  item.dataset.uid = label.uid;
  return item;
}

// Buttons for feedback on a label, which the server appends to its file; the last press counts.
export function marks(label, relevant) {
  const group = element("div", { class: "marks", role: "group", "aria-label": `is ${label.title || label.uid} relevant?` });
  for (const [value, text] of [[true, "relevant"], [false, "not relevant"]]) {
    group.append(element("button", { type: "button", class: "quiet", "data-relevant": value, "aria-pressed": String(relevant === value) }, text));
  }
  return group;
}

// What the figures beside a label mean.
export function meaning(labels, fused) {
  const likely = labels.some(({ probability }) => Number.isFinite(probability));
  const figures = likely
    ? "Score: ranks the labels of a query. Percent: the probability that the label is relevant, measured on labels with a similar score on the validation split."
    : "Score: ranks the labels of a query; it is not a probability.";
  const bars = fused
    ? `Bar: the ${likely ? "probability" : "score of the learnt fusion"}, relative to the best label; a label's parts are shown when it is opened.`
    : "Bar: what each part adds to the score.";
  return `${figures} ${bars}`;
}

export const legend = (weights, fused) => (fused ? [element("li", {}, element("i", { class: "fused" }), "learnt fusion of all parts")] : partsLegend(weights));

const partsLegend = (weights) => PARTS.filter(({ name }) => weights[name]).map(({ name, title }) =>
  element("li", {}, element("i", { class: name }), weights[name] === 1 ? title : `${title} × ${short(weights[name])}`));

const short = (value) => String(Number(value.toPrecision(3)));

// Why a label has its score; `explained` is the answer of /explain.
export function why(label, explained, fused) {
  const pieces = [sum(label, explained.weights, fused)];
  pieces.push(element("h3", {}, "What the model reads"), tokens(explained));
  pieces.push(element("h3", {}, "Nearest training queries"), nearest(label, explained.nearest ?? []));
  return pieces;
}

function sum(label, weights, fused) {
  const all = addends(label, weights);
  const rows = all.map(({ name, title, meaning, part, weight, adds }) => element("tr", {},
    element("th", { scope: "row", class: "part" }, element("i", { class: name }), title, element("small", {}, meaning)),
    element("td", {}, number(part)), element("td", {}, `× ${short(weight)}`), element("td", {}, number(adds))));
  const head = ["part", "value", "weight", "adds"].map((name) => element("th", { scope: "col" }, name));
  const line = (name, shown) => element("tr", {}, element("th", { scope: "row", colspan: "3" }, name), element("td", {}, shown));
  const blend = fused ? [line("weighted sum", number(all.reduce((total, { adds }) => total + adds, 0)))] : [];
  const score = line(fused ? "score: the learnt fusion of the weighted sum, ranks, votes, shared words and frequency" : "score", number(label.score));
  const likely = Number.isFinite(label.probability) ? [line(LIKELY, percent(label.probability))] : [];
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows), element("tfoot", {}, ...blend, score, ...likely));
}

function tokens(explained) {
  const list = element("ul", { class: "tokens" }, ...explained.tokens.map(({ piece, unknown }) => {
    const inside = piece.length > 2 && piece.startsWith("##"); // WordPiece: continues the word before
    const kind = [unknown ? "unknown" : "", inside ? "inside" : ""].filter(Boolean).join(" ");
    const about = unknown ? { title: "not in the model's vocabulary" } : {};
    return element("li", kind ? { class: kind, ...about } : about, inside ? piece.slice(2) : piece);
  }));
  const notes = [];
  if (!explained.tokens.length) notes.push("Nothing: the tokenizer knows no part of the query.");
  if (explained.unknown_tokens) notes.push(`Dashed: not in the model's vocabulary (${explained.unknown_tokens}).`);
  if (explained.truncated) notes.push("The text is longer than the model reads; the rest is cut off.");
  return element("div", {}, list, ...notes.map((note) => element("p", { class: "muted" }, note)));
}

function nearest(label, queries) {
  if (!queries.length) return element("p", { class: "muted" },
    "This bundle has no training queries: they are stored, and vote, if index.knn_weight is above 0 or auto.");
  return element("ul", { class: "near" }, ...queries.map(({ uid, title, cosine, labels }) => {
    const has = labels.some((other) => other.uid === label.uid);
    const others = labels.map((other) => other.title || other.uid).join(" · ");
    return element("li", has ? { class: "votes" } : {}, element("span", {}, title || uid, has ? " ✓" : ""),
      element("span", { title: "cosine to the query" }, number(cosine, 2)),
      element("small", {}, has ? "has this label. " : "", others || "no labels"));
  }));
}

const MEANINGS = {
  P: "share of the first {k} labels that are relevant", R: "share of the relevant labels among the first {k}",
  nDCG: "like P@{k}, but the order counts", PSP: "like P@{k}, but rare labels count more",
  MRR: "mean of 1 / rank of the first relevant label", coverage: "share of all labels among the first {k} of at least one query",
};

function metric(name) {
  const [kind, k] = name.split("@");
  const meaning = MEANINGS[kind];
  return meaning ? element("abbr", { title: meaning.replace("{k}", k ?? "") }, name) : name;
}

// The model's card; `card` is the answer of /card.
export function facts(card) {
  const { model, data } = card;
  const pairs = [];
  const add = (name, value, hint) => {
    if (value !== null && value !== undefined && value !== "") pairs.push(element("dt", {}, name), element("dd", hint ? { title: hint, class: "mono" } : {}, value));
  };
  if (model.name) add("model", `${model.name}, version ${model.version}${model.alias ? ` (${model.alias})` : ""}`);
  add("bundle", model.sha256.slice(0, 12), model.sha256);
  add("data set", data?.name);
  add("data", data?.sha256?.slice(0, 12), data?.sha256);
  add("labels", count(card.num_labels));
  add("trained on", data?.rows?.train ? `${count(data.rows.train)} queries` : null);
  add("queries for votes", card.num_neighbours ? `${count(card.num_neighbours)} queries` : null);
  add("query text", card.text);
  add("recipe", card.recipe);
  add("encoder", card.encoder);
  add("runs on", card.runtime);
  add("index", card.index ? `${card.index.kind}, ${count(card.index.width)} dimensions` : null);
  add("unidec", card.unidec);
  const pieces = [element("dl", {}, ...pairs)];
  for (const [split, values] of Object.entries(card.metrics ?? {})) {
    const names = Object.keys(values).filter((name) => Number.isFinite(values[name]) && !name.includes("/"));
    if (!names.length) continue;
    pieces.push(element("h3", {}, `Measured, ${split} split, percent`), element("dl", { class: "figures" },
      ...names.flatMap((name) => [element("dt", {}, metric(name)), element("dd", {}, number(values[name], 1))])));
  }
  return pieces;
}

export function served(card) {
  const { model, data } = card;
  const name = model.name ? `${model.name} ${model.version}${model.alias ? ` · ${model.alias}` : ""}` : `bundle ${model.sha256.slice(0, 12)}`;
  return [name, data?.name, `${count(card.num_labels)} labels`].filter(Boolean).join(" · ");
}
