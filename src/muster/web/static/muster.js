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

  // The search box, with its key.
  const find = document.getElementById("find");
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, textarea, select")) return;
    event.preventDefault();
    find?.select();
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
    const more = async () => {
      const query = cursor ? "cursor=" + encodeURIComponent(cursor) : "lines=200";
      const answer = await fetch("/api/v1/resources/" + encodeURIComponent(log.dataset.name) + "/logs?" + query, {credentials: "same-origin"});
      const part = await answer.json();
      const follows = text.scrollTop + text.clientHeight >= text.scrollHeight - 8;
      text.append(answer.ok ? part.text || (cursor ? "" : part.reason) : part.detail + "\n");
      if (text.textContent.length > most) text.textContent = text.textContent.slice(-most);
      if (follows) text.scrollTop = text.scrollHeight;
      cursor = part.cursor || cursor;
      if (log.open && answer.ok) timer = setTimeout(more, part.is_last ? 1000 : 0);
    };
    log.addEventListener("toggle", () => { clearTimeout(timer); if (log.open) more(); });
  }

  // Completion of predicates: the attributes that a field names, and those that are listed on the page.
  document.addEventListener("input", ({target}) => {
    if (!target.dataset.words) return;
    const field = target.closest(".field");
    field.querySelector(".words")?.remove();
    const word = /[\w.]+$/.exec(target.value.slice(0, target.selectionStart))?.[0];
    if (!word) return;
    const listed = [...document.querySelectorAll("[data-word]")].map((one) => one.dataset.word);
    const known = [...new Set([...target.dataset.words.split(" "), ...listed])];
    const fitting = known.filter((one) => one !== word && one.toLowerCase().startsWith(word.toLowerCase())).slice(0, 8);
    if (!fitting.length) return;
    const list = Object.assign(document.createElement("ul"), {className: "words"});
    list.setAttribute("role", "listbox");
    list.append(...fitting.map((one) => Object.assign(document.createElement("li"), {role: "option", textContent: one})));
    list.addEventListener("mousedown", (event) => { event.preventDefault(); complete(target, event.target.textContent); });
    field.append(list);
  });
  const complete = (input, word) => {
    const at = input.selectionStart, begun = /[\w.]*$/.exec(input.value.slice(0, at))[0];
    input.setRangeText(word, at - begun.length, at, "end");
    input.closest(".field").querySelector(".words")?.remove();
  };
  document.addEventListener("keydown", (event) => {
    const list = event.target.dataset?.words && event.target.closest(".field").querySelector(".words");
    if (!list) return;
    const rows = [...list.children], chosen = rows.findIndex((row) => row.ariaSelected === "true");
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (event.key === "Escape") list.remove();
    else if (event.key === "Enter" && chosen >= 0) complete(event.target, rows[chosen].textContent);
    else if (step) rows.forEach((row, n) => { row.ariaSelected = String(n === (chosen + step + rows.length) % rows.length); });
    else return;
    event.preventDefault();
  });
  document.addEventListener("focusout", (event) => { event.target.closest?.(".field")?.querySelector(".words")?.remove(); });

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

  const open = () => {
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

  setInterval(() => { if (Date.now() - heard > 40000) show("silent", "warn"); }, 5000);
  addEventListener("pagehide", () => { if (source) source.close(); });
  addEventListener("pageshow", (event) => { if (event.persisted) open(); });
  open();
})();
