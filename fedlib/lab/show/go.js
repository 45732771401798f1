if (!window.fedx) {
  window.fedx = 1;
  addEventListener("click", event => {
    const link = event.target.closest("a[href*='#']");
    const place = link ? decodeURIComponent(link.hash).slice(1) : "";
    const figure = ".fedx-go-" + CSS.escape(place.split(":")[0]);
    const input = place.includes(":") && document.querySelector(figure + " input");
    if (!input) return;
    event.preventDefault();
    event.stopPropagation();
    input.value = place;
    input.dispatchEvent(new Event("input", {bubbles: true}));
    input.closest(".fedx-live").scrollIntoView({block: "nearest"});
  }, true);
  const say = event => {
    const handle = event.target.closest(".fedx-live .noUi-handle");
    if (!handle) return;
    const box = handle.closest(".widget-inline-hbox");
    handle.setAttribute("aria-label", box.querySelector(".widget-label").textContent);
    handle.setAttribute("aria-valuetext", box.querySelector(".widget-readout").textContent);
  };
  addEventListener("focusin", say);
  addEventListener("keyup", say);
}
