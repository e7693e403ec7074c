"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const table = document.getElementById("verdict");
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const say = (text) => { document.getElementById("status").textContent = text; };

  // Sorting: numbers by data-sort (cells without a figure last), names by their text.
  const heads = [...table.querySelectorAll("th[data-key]")];
  const keyOf = (row, key) => key === "name" ? row.dataset.label : row.querySelector(`td[data-key="${key}"]`).dataset.sort;
  const order = (key, down) => (a, b) => {
    const x = keyOf(a, key), y = keyOf(b, key);
    if (key === "name") return (down ? -1 : 1) * x.localeCompare(y);
    if (x === "" || y === "") return (x === "") - (y === "");
    const [u, v] = [Number(x), Number(y)];
    return u === v ? a.dataset.index - b.dataset.index : (down ? -1 : 1) * (u < v ? -1 : 1);
  };
  for (const head of heads) {
    head.querySelector("button.sort").addEventListener("click", () => {
      const first = data.better[head.dataset.key] === "high" ? "descending" : "ascending";
      const other = first === "ascending" ? "descending" : "ascending";
      const now = head.getAttribute("aria-sort") === first ? other : first;
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", now);
      body.append(...[...rows].sort(order(head.dataset.key, now === "descending")));
      say(`Sorted by ${head.querySelector("button.sort").textContent.trim()}, ${now}.`);
    });
  }

  // Filtering: every word has to be somewhere in the row's names and notes.
  const filter = document.getElementById("filter");
  filter.addEventListener("input", () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !words.every((word) => row.dataset.text.includes(word));
      shown += !row.hidden;
    }
    say(`${shown} of ${rows.length} rows shown.`);
  });

  // Columns can be hidden; the headings above them shrink with them.
  const boxes = [...document.querySelectorAll("#columns input")];
  const show = () => {
    const hidden = new Set(boxes.filter((box) => !box.checked).map((box) => box.value));
    table.querySelectorAll("[data-key]").forEach((cell) => { cell.hidden = hidden.has(cell.dataset.key); });
    table.querySelectorAll("th[data-part]").forEach((part) => {
      const left = heads.filter((h) => h.dataset.of === part.dataset.part && !h.hidden).length;
      part.hidden = left === 0;
      part.colSpan = Math.max(1, left);
    });
    // A line where a part begins: at its first column that is shown.
    let last = null;
    for (const head of heads.filter((h) => h.dataset.of && !h.hidden)) {
      const cells = table.querySelectorAll(`[data-key="${head.dataset.key}"]`);
      cells.forEach((cell) => cell.classList.toggle("starts", head.dataset.of !== last));
      last = head.dataset.of;
    }
  };
  boxes.forEach((box) => box.addEventListener("change", show));

  // Comparison with the best of each column, or with one row.
  const reference = document.getElementById("reference");
  const compare = () => {
    const chosen = reference.value;
    for (const row of rows) {
      const i = Number(row.dataset.index);
      for (const cell of row.querySelectorAll("td[data-key]")) {
        const key = cell.dataset.key, better = data.better[key];
        const j = chosen === "best" ? data.best[key][i] : Number(chosen);
        cell.classList.remove("ref", "noise", "better", "worse");
        cell.title = cell.dataset.title;
        // Counted figures are not compared: no test was made of them.
        if (chosen === "none" || j === null || !better || cell.dataset.sort === "" || !data.tests[key]) continue;
        const test = data.tests[key][j][i];
        const open = "open" in cell.dataset;  // an attack that found something, or may have, is never marked as noise
        if (chosen === "best") {
          const mark = data.marks[key][i];
          if (mark && !(mark === "noise" && open)) cell.classList.add(mark);
        } else if (i === j) { cell.classList.add("ref"); }
        if (!test) continue;
        const [p, sign, name, told, tested] = test;
        const noise = !told;
        if (chosen !== "best" && tested && !(noise && open)) {
          cell.classList.add(noise ? "noise" : (sign > 0) === (better === "high") ? "better" : "worse");
        }
        const found = p === null ? "cannot be told" : `${noise ? "within noise" : "more than noise"}, p = ${p}`;
        cell.title += `. Against ${data.labels[j]}: ${found} (${data.names[name]})`;
      }
    }
  };
  reference.addEventListener("change", compare);

  // Colours: as the system says, or as chosen here.
  const theme = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  const apply = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
    theme.textContent = `Colours: ${name}`;
    theme.value = name;
  };
  const keep = (name) => { try { localStorage.setItem("fedaudit-theme", name); } catch { /* not kept then */ } };
  const kept = () => { try { return localStorage.getItem("fedaudit-theme"); } catch { return null; } };
  apply(themes.includes(kept()) ? kept() : "auto");
  theme.addEventListener("click", () => {
    const next = themes[(themes.indexOf(theme.value) + 1) % themes.length];
    apply(next); keep(next);
  });

  // What a heading or a figure means, on a tap or by keyboard: in a line above the table.
  const help = document.getElementById("help");
  const explain = (text) => { help.textContent = text; help.hidden = !text; };
  table.querySelectorAll("button.what").forEach((b) => b.addEventListener("click", () => explain(b.dataset.help)));
  body.addEventListener("click", (event) => {
    const cell = event.target.closest("td[data-key]");
    if (cell) explain(cell.title);
  });

  // A link to a method opens its card, also the one that the page was opened with.
  const reveal = () => {
    const card = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (card && card.matches("details")) { card.open = true; card.scrollIntoView(); }
  };
  addEventListener("hashchange", reveal);
  reveal();
  document.addEventListener("click", (event) => {
    const menu = document.querySelector(".menu");
    if (menu.open && !menu.contains(event.target)) menu.open = false;
  });
  show();
  compare();
})();
