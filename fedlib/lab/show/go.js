if(!window.fedx){window.fedx=1;addEventListener("click",e=>{
const a=e.target.closest("a[href*='#']"),h=a?decodeURIComponent(a.hash).slice(1):"",
t=h.includes(":")&&document.querySelector(".fedx-go-"+CSS.escape(h.split(":")[0])+" input");
if(!t)return;e.preventDefault();e.stopPropagation();t.value=h;
t.dispatchEvent(new Event("input",{bubbles:true}));
t.closest(".fedx-live").scrollIntoView({block:"nearest"})},true);
const say=e=>{const h=e.target.closest(".fedx-live .noUi-handle");
if(h)for(const[name,part]of[["label","label"],["valuetext","readout"]])
h.setAttribute("aria-"+name,h.closest(".widget-inline-hbox").querySelector(".widget-"+part).textContent)};
addEventListener("focusin",say);addEventListener("keyup",say)}
