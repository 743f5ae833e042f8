// The map of all machines: a canvas with one cell for each, by zone and group. A treemap: areas grow with numbers of machines.
"use strict";

(() => {
  const TONES = {up: "--map-up", completed: "--map-up", starting: "--map-busy", draining: "--map-warn", late: "--map-warn", unknown: "--map-warn", stale: "--map-calm", down: "--map-bad", failed: "--map-bad"};
  const HEAD = 18, LABEL = 15, GAP = 6, EVERY_MS = 1000, OPEN_MIN = 4, NONE = 255, LABELLED_MIN = 9, SHARED = 0.4, FITTING = 0.97, ROOM = 2500;
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const rgb = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const packed = ([r, g, b]) => (255 << 24 | b << 16 | g << 8 | r) >>> 0;  // as a little-endian machine stores a pixel
  const plain = (text) => text.replace(/[\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, "\ufffd");  // a name does not turn what follows it
  const mixed = (a, b, share) => a.map((value, n) => Math.round(value + (b[n] - value) * share));

  // Rectangles with areas in proportion to the sizes, as square as possible (Bruls, Huizing, van Wijk).
  const squarified = (sizes, x, y, width, height) => {
    const total = sizes.reduce((sum, size) => sum + size, 0) || 1;
    const scale = width * height / total;
    const made = new Array(sizes.length);
    let row = [], sum = 0;
    const worst = (areas, total, side) => Math.max(...areas.map((area) => Math.max(side * side * area / (total * total), total * total / (side * side * area))));
    const place = () => {
      const across = width >= height, side = across ? height : width, thick = sum / side;
      let at = across ? y : x;
      for (const [index, area] of row) {
        const long = area / thick;
        made[index] = across ? [x, at, thick, long] : [at, y, long, thick];
        at += long;
      }
      if (across) { x += thick; width -= thick; } else { y += thick; height -= thick; }
      row = []; sum = 0;
    };
    for (const index of sizes.map((_, n) => n).sort((a, b) => sizes[b] - sizes[a])) {
      const area = Math.max(sizes[index] * scale, 1e-9), side = Math.min(width, height), areas = row.map(([, own]) => own);
      if (row.length && worst([...areas, area], sum + area, side) > worst(areas, sum, side)) place();
      row.push([index, area]);
      sum += area;
    }
    if (row.length) place();
    return made;
  };

  class FleetMap {
    constructor(root) {
      this.root = root;
      this.canvas = root.querySelector("canvas");
      [this.metric, this.search, this.legend, this.count] = ["metric", "search", "legend", "count"].map((id) => document.getElementById("map-" + id));
      this.tip = root.querySelector(".tip");
      this.chosen = root.dataset.metric;
      this.focus = {};  // the zone and the group that are shown alone
      this.layout = "";
      [this.names, this.lower] = [[], []];
      this.metric.addEventListener("change", () => { this.chosen = this.metric.value; this.load(); });
      this.search.addEventListener("input", () => { this.match(); this.draw(); });
      this.search.addEventListener("keydown", (event) => { if (event.key === "Enter" && this.matched === 1) this.open(this.hits.indexOf(1)); });
      this.canvas.addEventListener("mousemove", (event) => this.point(event.offsetX, event.offsetY));
      this.canvas.addEventListener("mouseleave", () => { this.tip.hidden = true; });
      this.canvas.addEventListener("click", (event) => this.click(event.offsetX, event.offsetY));
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      this.load();
    }

    async load() {
      if (this.busy || document.hidden) return;
      this.busy = true;
      try {
        const asked = new URLSearchParams({metric: this.chosen, layout: this.layout});
        const answer = await fetch(`/api/v1/reports/map?${asked}`, {credentials: "same-origin"});
        if (!answer.ok) return;
        this.take(await answer.json());
      } catch { /* the next time */ } finally {
        this.busy = false;
        this.loadedMs = performance.now();
      }
    }

    take(map) {
      const bytes = atob(map.values);
      this.values = new Uint8Array(bytes.length);
      for (let n = 0; n < bytes.length; n++) this.values[n] = bytes.charCodeAt(n);
      this.map = map;
      if (map.blocks) {
        this.layout = map.layout;
        this.names = map.names.split("\n");
        this.lower = map.names.toLowerCase().split("\n");
        let first = 0;
        this.blocks = map.blocks.map((block) => { const made = {...block, first}; first += block.count; return made; });
        this.match();
        this.size = "";
      }
      const options = ["", ...map.metrics];
      if (this.metric.options.length !== options.length) {
        this.metric.replaceChildren(...options.map((name) => new Option(name ? name.replaceAll("_", " ") : "State", name, false, name === this.chosen)));
      }
      this.draw();
    }

    match() {
      const text = this.search.value.trim().toLowerCase();
      this.hits = null;
      this.matched = 0;
      if (!text) return;
      this.hits = new Uint8Array(this.names.length);
      this.lower.forEach((name, n) => { if (name.includes(text)) { this.hits[n] = 1; this.matched++; } });
    }

    // Where everything is, in pixels of the device.
    arrange() {
      const ratio = devicePixelRatio || 1, width = this.root.clientWidth;
      const blocks = this.blocks.filter(({zone, group}) => (!this.focus.zone || zone === this.focus.zone) && (!this.focus.group || group === this.focus.group));
      const machines = blocks.reduce((sum, block) => sum + block.count, 0);
      const most = Math.min(Math.max(width * 0.44, 200), Math.max(220, innerHeight * 0.62));
      const height = Math.round(Math.min(most, 130 + machines * ROOM / width));
      const size = [width, height, ratio, this.layout, this.focus.zone, this.focus.group].join();
      if (size === this.size) return;
      this.size = size;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.height = height + "px";
      const zones = [...new Set(blocks.map(({zone}) => zone))].map((name) => {
        const own = blocks.filter(({zone}) => zone === name);
        return {name, own, count: own.reduce((sum, block) => sum + block.count, 0)};
      });
      const gap = GAP * ratio, floor = machines * SHARED / Math.max(1, blocks.length);  // a small group needs room too
      this.zones = zones;
      squarified(zones.map(({own, count}) => count + own.length * floor), 0, 0, this.canvas.width + gap, this.canvas.height + gap).forEach(([x, y, w, h], n) => {
        const zone = zones[n];
        Object.assign(zone, {x, y, w: w - gap, h: h - gap, labelled: h > 3 * HEAD * ratio && w > 50 * ratio});
        const head = zone.labelled ? HEAD * ratio : 0;
        squarified(zone.own.map(({count}) => count + floor), x, y + head, zone.w + gap / 2, zone.h - head + gap / 2).forEach(([bx, by, bw, bh], m) => {
          const block = zone.own[m];
          Object.assign(block, {x: bx, y: by, w: bw - gap / 2, h: bh - gap / 2});
          block.labelled = zone.own.length > 1 && block.h > 3 * LABEL * ratio && block.w > 60 * ratio && block.w * (block.h - LABEL * ratio) > LABELLED_MIN * block.count;
        });
      });
      this.shown = blocks;
      // One size for all cells, in whole pixels: nearly square, and as large as fits. Blocks with few machines have smaller ones.
      const largest = Math.min(Math.ceil(Math.sqrt(this.canvas.width * this.canvas.height / Math.max(1, machines))) + 1, Math.round(26 * ratio));
      const shapes = [];
      for (let across = 1; across <= largest; across++) {
        const most = across < 4 ? 2 : 1.4;  // of few pixels, any shape that uses the space
        for (let down = Math.max(1, Math.ceil(across / most)); down <= Math.min(across * most, largest); down++) shapes.push([across, down]);
      }
      shapes.sort((a, b) => b[0] * b[1] - a[0] * a[1]);
      const fits = (block, [across, down], labelled = block.labelled) => Math.floor(block.w / across) * Math.floor((block.h - (labelled ? LABEL * ratio : 0)) / down) >= block.count;
      const fitting = shapes.find((shape) => blocks.reduce((sum, block) => sum + (fits(block, shape) ? block.count : 0), 0) >= machines * FITTING) || [1, 1];
      this.cell = fitting[0];
      for (const block of blocks) {
        block.labelled ||= zones.length + blocks.length > 2 && block.h > 3 * LABEL * ratio && block.w > 40 * ratio && fits(block, fitting, true);
        [block.cell, block.down] = fits(block, fitting) ? fitting : shapes.find((shape) => fits(block, shape)) || [1, 1];
        block.top = Math.round(block.y + (block.labelled ? LABEL * ratio : 0));
        block.left = Math.round(block.x);
        block.across = Math.max(1, Math.floor(block.w / block.cell));
      }
    }

    palette() {
      const [card, calm, up, bad] = ["--card", "--map-calm", "--map-up", "--map-bad"].map((name) => rgb(ink(name)));
      const made = new Uint32Array(512), high = rgb(ink("--map-warn"));
      const states = this.map.states.map((state) => rgb(ink(TONES[state] || "--map-calm")));
      for (let code = 0; code < 256; code++) {
        let color = calm;
        if (!this.map.metric) color = states[code] || calm;
        else if (code !== NONE) color = code < 127 ? mixed(up, high, code / 127) : mixed(high, bad, (code - 127) / 127);
        made[code] = packed(color);
        made[code + 256] = packed(mixed(color, card, 0.8));
      }
      return made;
    }

    draw() {
      if (!this.map || !this.root.clientWidth) return;
      this.arrange();
      const {canvas, values, hits} = this, ratio = devicePixelRatio || 1;
      const context = canvas.getContext("2d"), palette = this.palette();
      const image = context.createImageData(canvas.width, canvas.height);
      const pixels = new Uint32Array(image.data.buffer), wide = canvas.width, drawn = (size) => size > 3 ? size - 1 : size;
      for (const block of this.shown) {
        const {cell, down} = block, side = drawn(cell), tall = drawn(down);
        let place = block.top * wide + block.left, column = 0;
        for (let index = block.first, end = index + block.count; index < end; index++) {
          const color = palette[values[index] + (hits && !hits[index] ? 256 : 0)];
          for (let row = place, last = place + tall * wide; row < last; row += wide) {
            for (let pixel = row; pixel < row + side; pixel++) pixels[pixel] = color;
          }
          column++;
          place += cell;
          if (column === block.across) {
            place += down * wide - column * cell;
            column = 0;
          }
        }
      }
      context.putImageData(image, 0, 0);
      context.textBaseline = "top";
      const write = (text, x, y, width, font, color) => {
        context.font = font;
        context.fillStyle = color;
        let shown = plain(text);
        while (shown.length > 1 && context.measureText(shown).width > width) shown = shown.slice(0, -2) + "…";
        context.fillText(shown, x, y);
      };
      const sans = getComputedStyle(document.body).fontFamily;
      for (const zone of this.zones) {
        if (zone.labelled) write(`${zone.name}  ${zone.count.toLocaleString()}`, zone.x, zone.y + ratio, zone.w, `600 ${12.5 * ratio}px ${sans}`, ink("--ink"));
        for (const block of zone.own) {
          if (block.labelled) write(block.group, block.x, block.y + ratio, block.w, `${11 * ratio}px ${sans}`, ink("--soft"));
        }
      }
      const own = this.chosenBlock();
      if (own) {
        const n = this.cursor - own.first;
        context.lineWidth = 2 * ratio;
        context.strokeStyle = ink("--focus");
        context.strokeRect(own.left + n % own.across * own.cell - ratio, own.top + Math.floor(n / own.across) * own.down - ratio, drawn(own.cell) + 2 * ratio, drawn(own.down) + 2 * ratio);
      }
      this.describe();
      this.root.dataset.drawn = this.map.machines;
      this.firstMs ??= performance.now();  // since the page was requested
    }

    describe() {
      const {map, values} = this, counts = new Uint32Array(256);
      for (let n = 0; n < values.length; n++) counts[values[n]]++;
      const key = (color, text) => {
        const made = Object.assign(document.createElement("span"), {className: "key", textContent: text});
        made.style.setProperty("--key", color);
        return made;
      };
      const words = [];
      if (map.metric) {
        const share = !map.unit && map.low === 0 && map.high === 1;
        const figure = (value) => share ? `${Math.round(value * 100)} %` : `${parseFloat(value.toPrecision(3)).toLocaleString()}${map.unit}`;
        this.figure = figure;
        this.legend.replaceChildren(...[0, 0.5, 1].map((at) => key(["var(--map-up)", "var(--map-warn)", "var(--map-bad)"][at * 2], figure(map.low + at * (map.high - map.low)))));
        words.push(`coloured by ${map.metric}`);
      } else {
        const order = map.states.map((state, code) => [state, counts[code]]).sort((a, b) => b[1] - a[1]);
        this.legend.replaceChildren(...order.map(([state, count]) => key(`var(${TONES[state] || "--map-calm"})`, `${state} ${count.toLocaleString()}`)));
        words.push(...order.map(([state, count]) => `${state} ${count}`));
      }
      const shown = this.shown.reduce((sum, block) => sum + block.count, 0);
      this.canvas.setAttribute("aria-label", `Map of ${map.machines.toLocaleString()} machines: ${words.join(", ")}`);
      this.count.replaceChildren(this.hits ? `${this.matched.toLocaleString()} found` : "");
      if (this.focus.zone) {
        const back = Object.assign(document.createElement("button"), {type: "button", className: "quiet", textContent: "Whole fleet"});
        back.addEventListener("click", () => this.show({}));
        const {zone, group} = this.focus;
        const page = Object.assign(document.createElement("a"), {href: group ? `/group?name=${encodeURIComponent(group)}` : `/zone?name=${encodeURIComponent(zone)}`, textContent: `${group || zone}: ${shown.toLocaleString()} machines`});
        this.count.append(" ", page, " ", back);
      }
    }

    // The machine, the group or the zone at a place.
    at(offsetX, offsetY) {
      const ratio = devicePixelRatio || 1, x = offsetX * ratio, y = offsetY * ratio;
      const within = (box) => x >= box.x && x < box.x + box.w && y >= box.y && y < box.y + box.h;
      const zone = (this.zones || []).find(within), block = zone?.own.find(within);
      if (!block) return {zone};
      const column = Math.floor((x - block.left) / block.cell), row = Math.floor((y - block.top) / block.down);
      const n = row * block.across + column;
      const inside = column >= 0 && row >= 0 && column < block.across && n < block.count;
      return {zone, block, index: inside ? block.first + n : undefined};
    }

    point(x, y) {
      const {zone, block, index} = this.at(x, y);
      const parts = [];
      if (index !== undefined) {
        const code = this.values[index], {map} = this;
        const value = map.metric ? code === NONE ? "not measured" : this.figure(map.low + code / 254 * (map.high - map.low)) : map.states[code];
        parts.push(this.names[index], value);
      }
      if (block) parts.push(`${block.group}, ${block.zone}`);
      else if (zone) parts.push(`${zone.name}: ${zone.count.toLocaleString()} machines`);
      this.tip.hidden = !parts.length;
      this.canvas.style.cursor = parts.length ? "pointer" : "default";
      this.tip.textContent = parts.map(plain).join(" · ");
      this.tip.style.left = Math.min(x + 14, Math.max(0, this.root.clientWidth - this.tip.offsetWidth - 4)) + "px";
      this.tip.style.top = this.canvas.offsetTop + y + 16 + "px";
    }

    click(x, y) {
      const {zone, block, index} = this.at(x, y), ratio = devicePixelRatio || 1;
      if (index !== undefined && (this.cell >= OPEN_MIN * ratio || this.focus.group)) this.open(index);
      else if (block && (this.focus.zone || zone.own.length === 1 || index === undefined)) this.show({zone: block.zone, group: block.group});
      else if (zone) this.show({zone: zone.name});
    }

    // The block with the machine that was chosen by keyboard.
    chosenBlock() { return this.shown?.find(({first, count}) => this.cursor >= first && this.cursor < first + count); }

    // The arrow keys go from machine to machine, Enter opens one, Escape shows the whole fleet.
    key(event) {
      const begun = this.chosenBlock(), ratio = devicePixelRatio || 1;
      if (event.key === "Escape") this.show({});
      if (event.key === "Enter" && begun) this.open(this.cursor);
      const by = {ArrowLeft: -1, ArrowRight: 1, ArrowUp: -begun?.across, ArrowDown: begun?.across}[event.key];
      if (by === undefined || !this.shown?.length) return;
      event.preventDefault();
      const before = this.cursor;
      this.cursor = begun ? before + by : this.shown[0].first;
      const block = this.chosenBlock() || begun;
      if (!this.chosenBlock()) this.cursor = before;
      const n = this.cursor - block.first;
      this.draw();
      this.point((block.left + (n % block.across + 0.4) * block.cell) / ratio, (block.top + (Math.floor(n / block.across) + 0.4) * block.down) / ratio);
    }

    open(index) { location.href = "/machine?name=" + encodeURIComponent(this.names[index]); }

    show(focus) {
      this.focus = focus;
      this.cursor = undefined;
      this.tip.hidden = true;
      this.draw();
    }
  }

  const maps = new Map();
  const begin = () => {
    for (const root of document.querySelectorAll(".fleet-map")) {
      if (!maps.has(root)) maps.set(root, root.fleetMap = new FleetMap(root));
      else if (performance.now() - (maps.get(root).loadedMs || 0) > EVERY_MS) maps.get(root).load();
    }
    for (const root of maps.keys()) if (!root.isConnected) maps.delete(root);
  };
  addEventListener("muster-tick", begin);
  addEventListener("muster-theme", () => maps.forEach((map) => map.draw()));
  let resized = 0;
  addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => maps.forEach((map) => map.draw()), 150); });
  begin();
})();
