// A searchable list of labels: combobox and listbox as in the ARIA practices, chosen labels as chips.

import { get } from "./api.js";
import { element, same } from "./view.js";

const WAIT_MS = 120;
const SHOWN = 20;

export class Picker {
  // `changed` is called after each change of `labels`, a list of {uid, title}.
  constructor(root, changed) {
    this.labels = [];
    this.changed = changed;
    this.found = [];
    this.at = -1;
    const id = root.id;
    this.input = element("input", {
      id: `${id}-search`, type: "text", role: "combobox", autocomplete: "off", spellcheck: "false",
      "aria-expanded": "false", "aria-controls": `${id}-found`, "aria-autocomplete": "list", placeholder: root.dataset.hint,
    });
    this.list = element("ul", { id: `${id}-found`, class: "found", role: "listbox", "aria-label": `labels: ${root.dataset.name}` });
    this.list.hidden = true;
    this.chips = element("ul", { class: "chips", "aria-label": root.dataset.name });
    this.box = element("div", { class: "search" }, this.input, this.list);
    this.box.style.position = "relative";
    root.append(element("label", { for: `${id}-search` }, root.dataset.name), this.box, this.chips);
    this.input.addEventListener("input", () => this.#later());
    this.input.addEventListener("focus", () => this.#later());
    this.input.addEventListener("blur", () => this.#close());
    this.input.addEventListener("keydown", (event) => this.#key(event));
    this.list.addEventListener("mousedown", (event) => { // before the input loses the focus
      event.preventDefault();
      const place = [...this.list.children].indexOf(event.target.closest("li"));
      if (this.found[place]) this.add(this.found[place]);
    });
  }

  set(labels) {
    this.labels = labels;
    this.#draw();
  }

  // Replaces a label from the address with the server's facts about it.
  rename(found) {
    this.set(this.labels.map((label) => (label.uid === found.uid ? found : label)));
  }

  add(label) {
    if (!this.labels.some((other) => other.uid === label.uid)) this.labels = [...this.labels, label];
    this.input.value = "";
    this.#close();
    this.#draw();
    this.changed();
  }

  remove(uid) {
    const place = this.labels.findIndex((label) => label.uid === uid);
    this.labels = this.labels.filter((label) => label.uid !== uid);
    this.#draw();
    const left = this.chips.querySelectorAll("button");
    (left[Math.min(place, left.length - 1)] ?? this.input).focus();
    this.changed();
  }

  #draw() {
    same(this.chips, this.labels.map((label) => {
      const name = label.title || label.uid;
      const button = element("button", { type: "button", "aria-label": `remove ${name}` }, "×");
      button.addEventListener("click", () => this.remove(label.uid));
      const chip = element("li", { title: label.uid }, element("span", {}, label.unknown ? `${label.uid}: no such label` : name), button);
      if (label.unknown) chip.className = "unknown";
      return chip;
    }));
  }

  #later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#search(), WAIT_MS);
  }

  async #search() {
    this.running?.abort();
    this.running = new AbortController();
    const text = this.input.value.trim();
    let answer;
    try {
      answer = await get(`labels?prefix=${encodeURIComponent(text)}&limit=${SHOWN}`, this.running.signal);
    } catch (error) {
      if (error.name !== "AbortError") this.#show([], error.title);
      return;
    }
    if (document.activeElement !== this.input) return;
    const chosen = new Set(this.labels.map((label) => label.uid));
    const found = answer.labels.filter((label) => !chosen.has(label.uid));
    this.#show(found, found.length ? (answer.more ? "more: keep typing" : "") : "no matching labels", text !== "");
  }

  #show(found, note, first = false) {
    this.found = found;
    same(this.list, found.map((label, place) => element("li", { role: "option", id: `${this.list.id}-${place}`, "aria-selected": "false" },
      label.title || label.uid, label.title && !label.title.startsWith(label.uid) ? element("small", {}, label.uid) : "")));
    if (note) this.list.append(element("li", { class: "none", role: "option", "aria-disabled": "true" }, note));
    this.list.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
    this.#move(first && found.length ? 0 : -1);
  }

  #move(place) {
    this.at = place;
    for (const [i, item] of [...this.list.children].entries()) item.setAttribute("aria-selected", String(i === place));
    const item = this.list.children[place];
    if (item) {
      this.input.setAttribute("aria-activedescendant", item.id);
      item.scrollIntoView({ block: "nearest" });
    } else this.input.removeAttribute("aria-activedescendant");
  }

  #close() {
    clearTimeout(this.timer);
    this.running?.abort();
    this.list.hidden = true;
    this.found = [];
    this.at = -1;
    this.input.setAttribute("aria-expanded", "false");
    this.input.removeAttribute("aria-activedescendant");
  }

  #key(event) {
    const open = !this.list.hidden;
    const last = this.found.length - 1;
    if (event.key === "ArrowDown" && !open) this.#search();
    else if (event.key === "ArrowDown") this.#move(this.at >= last ? 0 : this.at + 1);
    else if (event.key === "ArrowUp" && open) this.#move(this.at <= 0 ? last : this.at - 1);
    else if (event.key === "Enter" && this.found[this.at]) this.add(this.found[this.at]);
    else if (event.key === "Escape" && open) this.#close();
    else if (event.key === "Backspace" && !this.input.value && this.labels.length) this.remove(this.labels.at(-1).uid);
    else return;
    if (event.key === "Backspace") this.input.focus();
    event.preventDefault();
    event.stopPropagation();
  }
}
