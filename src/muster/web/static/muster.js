// Keeps an open page live. Everything on it can be read, and every form sent, without this.
"use strict";

(() => {
  const themes = ["auto", "light", "dark"];
  const root = document.documentElement;
  const state = document.getElementById("live-state");

  // The theme: the system's, unless the user chose one.
  const button = document.getElementById("theme");
  if (button) {
    const say = () => { button.textContent = "Theme: " + root.dataset.theme; };
    button.hidden = false;
    say();
    button.addEventListener("click", () => {
      root.dataset.theme = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
      document.cookie = "muster-theme=" + root.dataset.theme + "; path=/; max-age=31536000; samesite=strict";
      say();
      dispatchEvent(new Event("muster-theme"));
    });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("muster-theme")));

  const make = (tag, text, look = "") => Object.assign(document.createElement(tag), {textContent: text, className: look});

  // Times are those of the reader, in the form that the server has chosen; it knows only UTC.
  const FORMS = {5: [11, 16], 8: [11, 19], 11: [5, 16], 16: [0, 16]};  // by the length of the text: parts of an ISO time
  const localize = (place) => {
    for (const one of place.querySelectorAll("[data-at]")) {
      const at = new Date(+one.dataset.at), form = FORMS[one.textContent.length];
      if (form) one.textContent = new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(...form).replace("T", " ");
    }
  };
  localize(document);

  // Suggestions below an input: the arrow keys choose one, Enter takes it, Escape closes them.
  const close = (input) => {
    input.parentElement.querySelector(":scope > .words")?.remove();
    for (const name of ["role", "aria-expanded", "aria-controls", "aria-activedescendant"]) input.removeAttribute(name);
  };
  const offer = (input, rows, take) => {  // rows: [words, hint, value]
    close(input);
    if (!rows.length) return;
    const list = Object.assign(make("ul", "", "words"), {id: "words", role: "listbox", ariaLabel: "Suggestions"});
    for (const [words, hint, value] of rows) {
      const row = make("li", words);
      Object.assign(row, {role: "option", id: "word-" + list.children.length});
      if (hint) row.append(" ", make("span", hint, "hint"));
      row.choose = () => { close(input); take(value); };
      row.addEventListener("mousedown", (event) => { event.preventDefault(); row.choose(); });
      list.append(row);
    }
    input.after(list);
    if (!input.matches("input")) return;
    Object.assign(input, {role: "combobox", ariaExpanded: "true"});
    input.setAttribute("aria-controls", "words");
  };
  document.addEventListener("keydown", (event) => {
    const list = event.target.parentElement?.querySelector(":scope > .words");
    if (!list) return;
    const rows = [...list.children], chosen = rows.findIndex((row) => row.ariaSelected === "true");
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (event.key === "Escape") close(event.target);
    else if (event.key === "Enter" && chosen >= 0) rows[chosen].choose();
    else if (step) {
      const next = (chosen + step + rows.length + (chosen < 0 && step < 0)) % rows.length;
      rows.forEach((row, n) => { row.ariaSelected = String(n === next); });
      event.target.setAttribute("aria-activedescendant", rows[next].id);
    } else return;
    event.preventDefault();
  });
  document.addEventListener("focusout", ({target}) => { if (target.parentElement) close(target); });

  // The search box, with its key. What is found is offered while a name is typed.
  const find = document.getElementById("find");
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
    event.preventDefault();
    find?.select();
  });
  let finding = 0;
  find?.addEventListener("input", () => {
    clearTimeout(finding);
    finding = setTimeout(async () => {
      const text = find.value.trim();
      if (text.length < 2) { close(find); return; }
      const answer = await fetch("/api/v1/find?q=" + encodeURIComponent(text), {credentials: "same-origin"}).catch(() => null);
      if (!answer?.ok || find.value.trim() !== text || document.activeElement !== find) return;
      const {items} = await answer.json();
      offer(find, items.slice(0, 12).map(({name, kind, page}) => [name, kind, page]), (page) => { location.href = page; });
    }, 200);
  });

  // On a narrow screen the menu starts closed.
  const menu = document.getElementById("menu");
  if (menu && matchMedia("(max-width: 900px)").matches) menu.open = false;

  // Whoever is about to destroy something is asked once more.
  document.addEventListener("submit", (event) => {
    const sure = event.target.dataset.sure;
    if (sure && !confirm(sure)) event.preventDefault();
  });

  // The log of a resource, followed while it is open.
  for (const log of document.querySelectorAll("details.log")) {
    const text = log.querySelector("pre"), most = 200000;
    let cursor = "", timer = 0;
    let failure = "";
    const more = async () => {
      const query = cursor ? "cursor=" + encodeURIComponent(cursor) : "lines=200";
      const address = "/api/v1/resources/" + encodeURIComponent(log.dataset.name) + "/logs?" + query;
      const part = await fetch(address, {credentials: "same-origin"}).then((answer) => answer.json()).catch((error) => ({detail: error.message}));
      const follows = text.scrollTop + text.clientHeight >= text.scrollHeight - 8, again = part.detail && part.detail === failure;
      failure = part.detail || "";
      if (!again) text.append(failure ? failure + "\n" : part.text || (cursor ? "" : part.reason));
      if (text.textContent.length > most) text.textContent = text.textContent.slice(-most);
      if (follows) text.scrollTop = text.scrollHeight;
      cursor = part.cursor || cursor;
      if (log.open) timer = setTimeout(more, failure ? 5000 : part.is_last ? 1000 : 0);
    };
    log.addEventListener("toggle", () => { clearTimeout(timer); if (log.open) more(); });
  }

  // Completion of predicates: the attributes that a field names, and those that are listed on the page.
  document.addEventListener("input", ({target}) => {
    if (!target.dataset.words) return;
    const word = /[\w.]+$/.exec(target.value.slice(0, target.selectionStart))?.[0] || "";
    const listed = [...document.querySelectorAll("[data-word]")].map((one) => one.dataset.word);
    const known = [...new Set([...target.dataset.words.split(" "), ...listed])];
    const fitting = known.filter((one) => word && one !== word && one.toLowerCase().startsWith(word.toLowerCase())).slice(0, 8);
    offer(target, fitting.map((one) => [one, "", one]), (chosen) => {
      const at = target.selectionStart, begun = /[\w.]*$/.exec(target.value.slice(0, at))[0];
      target.setRangeText(chosen, at - begun.length, at, "end");
    });
  });

  // A manifest is checked while it is written.
  let checking = 0;
  const check = async (editor) => {
    const manifest = editor.elements.manifest.value, status = editor.querySelector("[role=status]");
    const headers = {"Content-Type": "application/json", "X-CSRF-Token": editor.elements.form.value};
    const answer = manifest.trim() && await fetch("/api/v1/plans", {method: "POST", headers, credentials: "same-origin", body: JSON.stringify({manifest})}).catch(() => null);
    const plan = answer && await answer.json();
    if (editor.elements.manifest.value !== manifest) return;
    const counts = {};
    for (const {act} of plan?.items || []) counts[act] = (counts[act] || 0) + 1;
    const words = Object.entries(counts).map(([act, count]) => `${act} ${count}`).join(", ");
    status.textContent = !answer ? "" : answer.ok ? `Valid: ${words || "nothing changes"}.` : [plan.detail, plan.hint].filter(Boolean).join(" (") + (plan.hint ? ")" : "");
    status.className = answer && !answer.ok ? "hint bad" : "hint";
  };
  document.addEventListener("input", ({target}) => {
    const editor = target.closest("form.editor");
    clearTimeout(checking);
    if (editor) checking = setTimeout(check, 400, editor);
  });

  const address = document.body.dataset.live;
  if (!address || !state) return;

  const show = (text, look) => {
    state.textContent = text;
    state.className = "badge " + look;
  };

  // A section is replaced as a whole, but never while the user works in it.
  const replace = (id, markup) => {
    const place = document.getElementById(id);
    if (!place) return;
    const drawn = (parent) => [...parent.querySelectorAll(".plot, .fleet-map")].map((one) => JSON.stringify(one.dataset.title ? {...one.dataset} : "map")).join();
    if (drawn(place)) {  // charts keep themselves current
      const made = document.createElement("template");
      made.innerHTML = markup;
      if (drawn(made.content) === drawn(place)) return;
    }
    const active = document.activeElement;
    if (active && place.contains(active) && active.matches("input, textarea, select")) return;
    const key = active && place.contains(active) ? active.getAttribute("href") : null;
    const left = [...place.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one.scrollTop]);
    place.innerHTML = markup;
    localize(place);
    [...place.querySelectorAll(".scroll")].forEach((one, index) => {
      if (left[index]) [one.scrollLeft, one.scrollTop] = left[index];
    });
    if (key) {
      const again = [...place.querySelectorAll("a")].find((one) => one.getAttribute("href") === key);
      if (again) again.focus({preventScroll: true});
    }
  };

  let wait = 500;
  let heard = Date.now();
  let source = null;

  // A hidden page keeps no connection: browsers have six for all pages of a server.
  const open = () => {
    source?.close();
    if (document.hidden) return;
    source = new EventSource(address);
    source.addEventListener("sections", (event) => {
      const update = JSON.parse(event.data);
      wait = 500;
      heard = Date.now();
      for (const [id, markup] of Object.entries(update.sections)) replace(id, markup);
      dispatchEvent(new Event("muster-tick"));
      if (update.connected) show("live", "good"); else show("domain away", "warn");
    });
    source.onerror = () => {
      show("reconnecting", "warn");
      source.close();
      setTimeout(again, wait);
      wait = Math.min(wait * 2, 5000);
    };
  };

  // After a loss: is it the login, or the server? One leads to the login page, the other to another try.
  const again = () => {
    fetch("/api/v1/me", {credentials: "same-origin", cache: "no-store"}).then((answer) => {
      if (answer.status === 401) {
        location.href = "/login?next=" + encodeURIComponent(location.pathname + location.search);
      } else {
        open();
      }
    }).catch(() => {
      setTimeout(again, wait);
      wait = Math.min(wait * 2, 5000);
    });
  };

  setInterval(() => { if (Date.now() - heard > 40000 && !document.hidden) show("silent", "warn"); }, 5000);
  document.addEventListener("visibilitychange", () => { heard = Date.now(); open(); });
  addEventListener("pagehide", () => { if (source) source.close(); });
  addEventListener("pageshow", (event) => { if (event.persisted) open(); });
  open();
})();
