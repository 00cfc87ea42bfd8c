"""How the page looks, in the light and in the dark; nothing is fetched."""

from __future__ import annotations

_LIGHT = """
--page:#f6f7f9;--card:#fff;--text:#1b2330;--soft:#5b6675;--line:#e1e5ea;--idle:#eceff3;
--loss:#1f6fd6;--bits:#d5620b;--norm:#7b3fc4;--lr:#12805c;--speed:#0b7d92;
--good:#12805c;--bad:#c8232c;--warn:#9a6400;
--busy:#9fc0ee;--c0:#b9c0ca;--c1:#e8843c;--c2:#8a5fd0;--c3:#1f9c96;--c4:#737d8c;
--f:#9cc4f5;--f2:#5c97e0;--b:#3fa05f;--b2:#25733f;--w:#f4d35e;--w2:#d3a914;
--on-f:#10203a;--on-b:#fff;--on-w:#3a2f00;
"""
_DARK = """
--page:#10141a;--card:#181e27;--text:#e6eaf0;--soft:#98a4b3;--line:#2b3440;--idle:#242c37;
--loss:#6aa9ff;--bits:#ff9d57;--norm:#bd93f9;--lr:#4fc89b;--speed:#4fc3d9;
--good:#4fc89b;--bad:#ff6b70;--warn:#f0b849;
--busy:#3f6aa8;--c0:#59636f;--c1:#d9772f;--c2:#9a74dd;--c3:#2aa8a1;--c4:#8b96a5;
--f:#7fb0ea;--f2:#4a80c4;--b:#3d9159;--b2:#276a3f;--w:#dcbb48;--w2:#b38f12;
--on-f:#10203a;--on-b:#fff;--on-w:#2a2200;
"""
_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1180px;margin:0 auto;padding:24px 20px 48px}
h1{font-size:26px;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;margin:34px 0 10px}
h2 small{font-weight:400;color:var(--soft);font-size:14px}
.about{color:var(--soft);margin:4px 0 0}
.verdict{font-size:17px;font-weight:600;margin:16px 0 12px}
.verdict::before{content:"";display:inline-block;width:11px;height:11px;border-radius:50%;
background:currentColor;margin-right:9px}
.verdict.good{color:var(--good)}.verdict.bad{color:var(--bad)}.verdict.part{color:var(--warn)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:0}
.tiles div,.card,figure{background:var(--card);border:1px solid var(--line);border-radius:8px}
.tiles div{padding:10px 14px 11px}
.tiles dt{color:var(--soft);font-size:13px}
.tiles dd{margin:0}
.tiles dd.big{font-size:23px;font-weight:600;line-height:1.25}
.tiles dd+dd{color:var(--soft);font-size:12.5px}
.charts{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:12px}
figure{margin:0;padding:12px 16px 10px}
.chart.wide{grid-column:1/-1}
figcaption{display:flex;justify-content:space-between;gap:12px;margin-bottom:8px}
.unit,.note,.legend,.empty{color:var(--soft);font-size:13px}
.newest{font-weight:600;color:var(--hue);white-space:nowrap}
.plot{position:relative;height:170px;margin:6px 12px 22px 44px}
.wide .plot{height:250px}
.plot svg{position:absolute;width:100%;height:100%;overflow:visible}
.plot path{fill:none;vector-effect:non-scaling-stroke;stroke-linejoin:round;stroke-linecap:round}
.plot span{position:absolute;color:var(--soft);font-size:12px;line-height:1;white-space:nowrap}
.plot .y{right:100%;margin-right:8px;transform:translateY(-50%)}
.plot .x{top:100%;margin-top:8px;transform:translateX(-50%)}
.plot .grid{stroke:var(--line);stroke-width:1}
.plot .line{stroke:var(--hue);stroke-width:2}
.plot .raw{stroke:var(--hue);stroke-width:1;opacity:.33}
.plot .dot{stroke:var(--hue);stroke-width:7}
.plot .restart{stroke:var(--soft);stroke-width:1;stroke-dasharray:4 4}
.plot .bad{stroke:var(--bad);stroke-width:2;stroke-linecap:butt}
.loss{--hue:var(--loss)}.bits{--hue:var(--bits)}.norm{--hue:var(--norm)}
.lr{--hue:var(--lr)}.speed{--hue:var(--speed)}
.empty{padding:30px 0;text-align:center;margin:0}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;margin:8px 2px 0}
.legend i{display:inline-block;width:20px;height:12px;margin-right:7px;vertical-align:-1px}
.legend .k-mean,.legend .k-each{height:2px;vertical-align:4px;background:var(--loss)}
.legend .k-each{height:1px;opacity:.6}
.legend .k-restart{height:0;border-top:1px dashed var(--soft);vertical-align:4px}
.legend .k-bad{width:2px;background:var(--bad)}
.legend .k-idle{background:var(--idle)}.legend .k-none{background:var(--warn)}
.legend .k-f,.legend .k-b,.legend .k-i,.legend .k-w{border-radius:2px}
.legend .k-f{background:var(--f)}.legend .k-b,.legend .k-i{background:var(--b)}
.legend .k-w{background:var(--w)}
.legend .k-busy,.bar .busy{background:var(--busy)}
.legend .k-c0,.bar .c0{background:var(--c0)}.legend .k-c1,.bar .c1{background:var(--c1)}
.legend .k-c2,.bar .c2{background:var(--c2)}.legend .k-c3,.bar .c3{background:var(--c3)}
.legend .k-c4,.bar .c4{background:var(--c4)}
.findings{margin:0 0 14px;padding:0;list-style:none;font-size:16px}
.findings li{margin:3px 0}
h3{font-size:14px;font-weight:600;margin:16px 0 8px}
h3:first-child{margin-top:0}
h3 small{font-weight:400;color:var(--soft);font-size:13px}
.lost{width:100%}
.lost td,.lost th{padding:5px 14px 5px 0;white-space:nowrap;vertical-align:middle}
.lost .n{text-align:right}
.lost .wide{width:36%;min-width:220px}
.lost .zero{color:var(--soft)}
.lost .group{text-align:center;border-bottom:0;padding-bottom:0;white-space:normal}
.lost .shared{border-left:2px solid var(--line);padding-left:14px;background:var(--page)}
.bar.whole{height:30px;margin:0 0 2px}
.bar.whole i{font-weight:600;font-size:13px;font-style:normal;line-height:30px;
text-align:center;
overflow:hidden;white-space:nowrap;color:#10141a}
.bar.whole .c2,.bar.whole .c3,.bar.whole .c4{color:#fff}
.bar{display:flex;height:18px;border-radius:3px;overflow:hidden}
.bar i{display:block;height:100%}
.card{padding:14px 16px}
.card .legend{margin-top:10px}
.scroll{overflow:auto;max-height:600px}
.timeline{display:flex}
.names{position:relative;width:44px;flex:none}
.names span{position:absolute;font-size:12.5px;line-height:24px;color:var(--soft)}
.timeline .scroll{min-width:0;max-height:none}
.timeline svg{display:block;font-size:11px}
.timeline rect{rx:2px}
.timeline text{text-anchor:middle;pointer-events:none}
.timeline .idle{fill:var(--idle)}
.timeline .c2 rect{fill:var(--c2)}.timeline .c3 rect{fill:var(--c3)}
.timeline .c4 rect{fill:var(--c4)}
.timeline .axis{fill:var(--soft)}
.timeline .start{text-anchor:start}.timeline .end{text-anchor:end}
.timeline g rect{stroke:var(--card);stroke-width:1}
.timeline .fine g rect{stroke-width:.3}
.timeline .f rect{fill:var(--f)}.timeline .f.later rect{fill:var(--f2)}
.timeline .b rect,.timeline .i rect{fill:var(--b)}
.timeline .b.later rect,.timeline .i.later rect{fill:var(--b2)}
.timeline .w rect{fill:var(--w)}.timeline .w.later rect{fill:var(--w2)}
.timeline .f text{fill:var(--on-f)}.timeline .w text{fill:var(--on-w)}
.timeline .b text,.timeline .i text{fill:var(--on-b)}
.timeline .none rect{fill:var(--warn)}
table{border-collapse:collapse;font-size:14px}
th,td{text-align:left;padding:6px 18px 6px 0;border-bottom:1px solid var(--line);
vertical-align:top}
thead th{color:var(--soft);font-weight:500;font-size:13px}
tbody tr:last-child>*{border-bottom:0}
.events td{white-space:nowrap}
.events td:nth-child(5){white-space:normal;overflow-wrap:anywhere;min-width:280px}
.layout td:nth-child(2){white-space:nowrap}
.ranks{white-space:nowrap}
.rank{display:inline-block;min-width:26px;padding:0 6px;margin-right:4px;text-align:center;
border-radius:5px;background:var(--idle)}
details{margin-top:10px}
summary{cursor:pointer;color:var(--soft)}
pre{overflow-x:auto;margin:10px 0 0;
font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media(max-width:720px){
main{padding:16px 12px 32px}
.charts{grid-template-columns:minmax(0,1fr)}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}
.tiles dd.big{font-size:20px}
.wide .plot{height:200px}
}
"""


def stylesheet() -> str:
    dark = f"@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    return f":root{{color-scheme:light dark;{_LIGHT}}}{dark}{_RULES}"
