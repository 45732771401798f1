// On paper everything is open, and light; afterwards it is as it was.
let folded = [];
let theme = null;
addEventListener("beforeprint", () => {
  folded.push(...document.querySelectorAll("article details:not([open])"));
  for (const part of folded) part.open = true;
  theme ??= document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
});
addEventListener("afterprint", () => {
  for (const part of folded) part.open = false;
  folded = [];
  document.documentElement.dataset.theme = theme;
  theme = null;
});

// Claims are chosen by their fields. An address chooses, too: #only-contradicted is a choice's name.
for (const form of document.querySelectorAll("form.claims-filter")) {
  const claims = [...document.querySelectorAll(".claims-list tbody tr")];
  const show = () => {
    const asked = [...form.querySelectorAll("select")].map((field) => field.value).filter(Boolean);
    for (const claim of claims) {
      claim.hidden = !asked.every((mark) => claim.classList.contains(mark));
    }
    const shown = claims.filter((claim) => !claim.hidden).length;
    form.querySelector("output").value = `${shown} of ${claims.length} claims`;
  };
  const follow = () => {
    const choice = document.getElementById(location.hash.slice(1));
    if (choice instanceof HTMLOptionElement) {
      form.reset();
      choice.selected = true;
      form.scrollIntoView();
    }
    show();
  };
  form.addEventListener("change", show);
  addEventListener("hashchange", follow);
  follow();
}

// A link to a place that is folded away, or to a folded section, opens it.
function unfold() {
  let name = location.hash.slice(1);
  try {
    name = decodeURIComponent(name);
  } catch {} // an address with a stray percent sign: it is taken as it is
  const place = document.getElementById(name);
  const folded = place?.closest("section")?.querySelector(":scope > details.folded:not([open])");
  const around = [];
  for (let part = folded ?? place; part; part = part.parentElement) {
    if (part.matches("details:not([open])")) around.push(part);
  }
  for (const part of around) part.open = true;
  if (around.length) place.scrollIntoView();
}
addEventListener("hashchange", unfold);
if (location.hash) unfold();

// A box wider than its column scrolls by itself: the keyboard reaches it, it says what it does, and
// a shadow shows on which side there is more.
const BOXES = {
  Formula: "div.math",
  Output: ".cell_output pre",
  Code: "pre",
  Table: ".pst-scrollable-table-container, .table-wide, .cell_output .text_html",
};
const sized = new ResizeObserver((seen) => seen.forEach(({ target }) => tell(target)));
function tell(place) {
  const kind = Object.keys(BOXES).find((name) => place.matches(BOXES[name]));
  const box = kind === "Formula" ? place.querySelector("mjx-container") : place;
  if (!box) return; // not set yet
  const more = box.scrollWidth - box.clientWidth;
  const told = { tabindex: 0, role: "group", "aria-label": `${kind} that scrolls sideways` };
  for (const [name, value] of Object.entries(told)) {
    if (more > 1) box.setAttribute(name, value);
    else box.removeAttribute(name);
  }
  box.classList.toggle("more-before", box.scrollLeft > 1);
  box.classList.toggle("more-after", box.scrollLeft < more - 1);
}
for (const box of document.querySelectorAll(`article :is(${Object.values(BOXES)})`)) {
  box.addEventListener("scroll", () => tell(box), { passive: true, capture: true });
  sized.observe(box);
}
