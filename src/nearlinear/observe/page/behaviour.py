"""The page's JavaScript: details under the pointer, a zoom into the timelines. Without it nothing is hidden."""

BEHAVIOUR = """
"use strict";
(() => {
  // 1. Details: what browsers show of a <title> after a while is shown at once, and for a finger too.
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.hidden = true;
  document.body.append(tip);
  const told = new WeakMap();
  for (const title of document.querySelectorAll("svg[role=img] > title")) {
    const svg = title.parentNode;
    svg.setAttribute("aria-label", title.textContent);
    svg.removeAttribute("aria-labelledby");
    title.remove();
  }
  const show = (event) => {
    const over = event.target instanceof Element ? event.target.closest(".tip") : null;
    if (!over) { tip.hidden = true; return; }
    if (!told.has(over)) {
      const title = over.querySelector(":scope > title");
      told.set(over, title ? title.textContent : "");
      if (title) title.remove();
    }
    tip.textContent = told.get(over);
    tip.hidden = !tip.textContent;
    const room = tip.getBoundingClientRect(), far = 14;
    let x = event.clientX + far, y = event.clientY + far;
    if (x + room.width > innerWidth - 6) x = Math.max(6, event.clientX - far - room.width);
    if (y + room.height > innerHeight - 6) y = Math.max(6, event.clientY - far - room.height);
    tip.style.left = x + "px";
    tip.style.top = y + "px";
  };
  addEventListener("pointermove", show);
  addEventListener("pointerdown", show);
  addEventListener("scroll", () => { tip.hidden = true; }, true);
  addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });

  // 2. Zoom: a timeline is placed in per cent, so a wider picture shows more; all of a figure keep step.
  const most = 64;
  for (const figure of document.querySelectorAll(".timelines")) {
    const views = [...figure.querySelectorAll(".view")];
    let zoom = 1;
    const refit = () => {
      for (const view of views) {
        const svg = view.querySelector("svg"), wide = svg.getBoundingClientRect().width;
        for (const text of svg.querySelectorAll(".in"))
          text.classList.toggle("on", text.dataset.s / 100 * wide > text.textContent.length * 6.2 + 5);
        const ticks = [...svg.querySelectorAll(".ticks")];
        const shown = ticks.filter((each) => each.dataset.from <= Math.max(1, wide / 900)).pop();
        for (const each of ticks) each.classList.toggle("on", each === (shown || ticks[0]));
      }
    };
    const set = (wanted, view, at) => {
      const before = zoom, within = at ?? view.clientWidth / 2;
      zoom = Math.min(most, Math.max(1, wanted));
      const left = (view.scrollLeft + within) * zoom / before - within;
      for (const each of views) each.querySelector("svg").setAttribute("width", 100 * zoom + "%");
      for (const each of views) each.scrollLeft = left;
      refit();
    };
    for (const button of figure.querySelectorAll("button"))
      button.addEventListener("click", () => set(zoom * button.dataset.zoom, views[0]));
    for (const view of views) {
      const place = (event) => event.clientX - view.getBoundingClientRect().left;
      view.addEventListener("dblclick", (event) => set(zoom * 2, view, place(event)));
      view.addEventListener("wheel", (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        set(zoom * Math.exp(-event.deltaY / 200), view, place(event));
      }, { passive: false });
      view.addEventListener("keydown", (event) => {
        if (event.key === "+" || event.key === "=") set(zoom * 2, view);
        else if (event.key === "-") set(zoom / 2, view);
        else if (event.key === "0") set(1, view);
      });
      view.addEventListener("scroll", () => {
        for (const other of views)
          if (Math.abs(other.scrollLeft - view.scrollLeft) > 1) other.scrollLeft = view.scrollLeft;
      });
    }
    const tools = figure.querySelector(".tools");
    if (tools) tools.hidden = false;
    addEventListener("resize", refit);
    refit();
  }
})();
"""
