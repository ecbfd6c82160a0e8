"""How timeline.html looks and moves: its style, patterns and script, written into the page so that it loads nothing.

Colours of the actions are those of the pictures (section 2.3's Figure 2(c), coloured by micro-batch) and the same on
light and dark ground; only paper, ink and what is idle follow the reader's choice.
"""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#25262c;--pale:#71737d;--rule:#dcdde3;--idle:#f1f1f4;--line:#cfd0d8;
--waiting:#e2e2e8;--transfer:#8a8c96;--update:#3e404a}
@media(prefers-color-scheme:dark){:root{--paper:#17181c;--ink:#e8e8ee;--pale:#9a9ca8;--rule:#34363f;--idle:#212329;
--line:#3b3d47;--waiting:#2b2d35;--transfer:#7d808c;--update:#d3d4dc}}
body{margin:0 auto;max-width:1280px;padding:20px 24px 40px;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
header{display:flex;flex-wrap:wrap;gap:8px 24px;align-items:baseline;justify-content:space-between}
h1{font-size:20px;margin:0;font-weight:650}
label{color:var(--pale)}
select{font:inherit;color:var(--ink);background:var(--paper);border:1px solid var(--rule);border-radius:6px;
padding:3px 8px}
figure{margin:20px 0 0;overflow-x:auto}
figcaption{display:flex;gap:12px;margin-bottom:6px}
figcaption span{margin-left:auto;font-variant-numeric:tabular-nums}
figure svg{width:100%;min-width:760px;display:block}
img{width:100%;margin-top:20px;border-radius:6px}
text{font:12px system-ui,sans-serif;dominant-baseline:middle;text-anchor:middle;pointer-events:none}
.name{text-anchor:end;fill:var(--ink);font-size:13px}
.time{fill:var(--pale)}
.tick{stroke:var(--rule);fill:none}
rect{stroke:var(--paper);stroke-width:.7}
rect:hover{stroke:var(--ink);stroke-width:1.6}
.idle{fill:url(#idle)}.waiting{fill:url(#waiting)}.transfer{fill:url(#transfer)}.update{fill:var(--update)}
text.F,text.R{fill:#25262c}text.B{fill:#fff}
.legend{display:flex;flex-wrap:wrap;gap:6px 20px;margin:12px 0 0;align-items:center;font-size:13px}
.legend span{display:inline-flex;gap:7px;align-items:center}
.legend i{width:110px;height:14px;border-radius:2px}
.legend svg{width:34px;height:14px}
.legend em{color:var(--pale);font-style:normal}
table{border-collapse:collapse;margin-top:24px;font-variant-numeric:tabular-nums}
th,td{padding:4px 18px 4px 0;text-align:right;border-bottom:1px solid var(--rule);font-weight:400}
tbody th{text-align:left}
thead th{color:var(--pale)}
#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--paper);padding:5px 9px;border-radius:6px;
font-size:13px;white-space:pre}
[hidden]{display:none!important}
"""

_HATCH = '<path d="M0 0V6" stroke="var(--line)" stroke-width="1.6"/>'
PATTERNS = f"""
<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">
<path d="M0 0H6V6H0z" fill="var(--idle)"/>{_HATCH}</pattern>
<pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">
<path d="M0 0H6V6H0z" fill="var(--waiting)"/>{_HATCH}</pattern>
<pattern id="transfer" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path d="M0 0H4V4H0z" fill="var(--paper)"/>
<path d="M0 0V4M0 0H4" stroke="var(--transfer)" stroke-width="2.2"/></pattern>
</defs></svg>"""

# What a bar is stands in its title, which browsers show late and small; the script shows it at once. Without scripts
# the newest step and all titles are there.
SCRIPT = """
const chooser=document.getElementById('chooser'),tip=document.getElementById('tip');
function choose(){document.querySelectorAll('section').forEach(s=>s.hidden=s.id!=='picture'+chooser.value)}
chooser.addEventListener('change',choose);choose();
document.addEventListener('pointermove',event=>{
const bar=event.target.closest('rect');
if(!bar){tip.hidden=true;return}
const title=bar.querySelector('title');
if(title){bar.dataset.tip=title.textContent;title.remove()}
tip.textContent=bar.dataset.tip.replace('|','\\n');tip.hidden=false;
const x=Math.min(event.clientX+14,innerWidth-tip.offsetWidth-8),y=event.clientY+18;
tip.style.left=x+'px';tip.style.top=(y+tip.offsetHeight>innerHeight?event.clientY-tip.offsetHeight-10:y)+'px'});
"""
