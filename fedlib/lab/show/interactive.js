for(const r of document.querySelectorAll("[id='NAME']"))if(!r.dataset.on){
r.dataset.on=1;
let was=-1;
const q=s=>[...r.querySelectorAll(s)],D=JSON.parse(q("script")[0].textContent),
C=q("input,select"),
at=([a,b,l],v)=>Math.max(-9e3,Math.min(9e3,a+b*(l?Math.log10(v):v))).toFixed(1),
put=(s,d)=>q(s).forEach((e,i)=>e.setAttribute("d",d[i]||"")),
trace=(p,m)=>{
let d="",on=0,i=0,k=m?2*Math.ceil(p.length/48):2;
for(;i<p.length;i+=k)
if(p[i]==null||p[i+1]==null)on=0;
else{d+=(m||!on?"M":"L")+at(D.x,p[i])+" "+at(D.y,p[i+1])+(m||"");on=1}
return d},
runs=t=>{
let d=Array(10).fill("");
t.forEach((s,j)=>{for(let i=0,e;i<s.length;i=e){
for(e=i+1;s[e]==s[i];)e++;
d[s[i]]+=`M${i} ${j}.1h${e-i}v.8h${i-e}z`}});
return d.slice(1)},
draw=()=>{
let n=0;
C.forEach((c,i)=>{
n=n*D.n[i]+ +c.value;
const k=c.nextElementSibling,t=D.t[i][c.value];
if(k){
c.previousElementSibling.textContent=t;
c.setAttribute("aria-valuetext",t);
[...k.children].forEach((e,j)=>e.classList.toggle("on",j==c.value))}});
if(n==was)return;
if(was>=0)q(".fedx-o").forEach(g=>
g.replaceChildren(...q(".fedx-p>.fedx-l").map(e=>e.cloneNode())));
was=n;
const [f,s,k,w]=D.f[n],V=D.v;
q("[data-c]").forEach(e=>{
const[i,v]=e.dataset.c.split(",");
e.toggleAttribute("data-on",C[i].value==v)});
q(".fedx-e>span").forEach((e,i)=>e.hidden=V[f[i]]=="");
put(".fedx-p>.fedx-l",f.map((v,i)=>D.m[i][0]?trace(V[v]):""));
put(".fedx-m",f.map((v,i)=>D.m[i][1]?trace(V[v],D.m[i][1]):""));
put("g .fedx-h",runs(V[s]));
put(".fedx-k",[V[k].map(c=>`M${c} 0v${V[s].length}`).join("")]);
q("dd").forEach((e,i)=>{if(e.textContent!=w[i])e.textContent=w[i]})};
C.forEach(c=>c.addEventListener("input",draw));
q(".fedx-c")[0].hidden=false;
draw();
const go=h=>{
const[n,s]=decodeURIComponent(h).split(":"),
E=(s||"").split("&").map(p=>q("[id]").find(e=>e.id==r.id+":"+p));
if(n!="#"+r.id||E.includes(undefined))return;
E.forEach(e=>{
const p=e.parentElement,c=C.find(c=>c.parentElement.contains(e));
c.value=[...p.children].indexOf(e);
c.focus({preventScroll:true})});
draw();
r.scrollIntoView({behavior:"instant"})};
addEventListener("hashchange",()=>go(location.hash));
document.addEventListener("click",e=>{const a=e.target.closest("a[href^='#']");if(a)go(a.hash)});
go(location.hash)}
