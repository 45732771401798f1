// On paper everything is open; afterwards it is as it was.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("article details:not([open])")];
  for (const part of folded) part.open = true;
});
addEventListener("afterprint", () => {
  for (const part of folded) part.open = false;
});
