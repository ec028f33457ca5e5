"""The page's style: one set of colours for light screens, one for dark ones, two widths."""

from __future__ import annotations

# Of stages, curves and kinds of work; 3:1 at least against the page and its panels, text 4.5:1 (the tests measure it).
LIGHT = {
    "page": "#ffffff",
    "panel": "#f5f7f9",
    "ink": "#1b2027",
    "quiet": "#57606a",
    "line": "#d5dbe1",
    "c0": "#2473cf",
    "c1": "#cc5a12",
    "c2": "#23824a",
    "c3": "#a24ac4",
    "c4": "#0e8089",
    "c5": "#d03a56",
    "c6": "#7d6b00",
    "c7": "#8a5a44",
    "idle": "#868f99",
    "ideal": "#6b747e",
}
DARK = {
    "page": "#0f1318",
    "panel": "#171d24",
    "ink": "#e7ecf1",
    "quiet": "#9fa9b4",
    "line": "#2f3842",
    "c0": "#5aa2f2",
    "c1": "#ef8b4b",
    "c2": "#53b87c",
    "c3": "#c98be3",
    "c4": "#3fb6c0",
    "c5": "#f0768c",
    "c6": "#c2ab3c",
    "c7": "#c7957d",
    "idle": "#6f7984",
    "ideal": "#8f9aa6",
}


def style() -> str:
    """Return the style sheet."""
    return (
        f":root{{{_variables(LIGHT)}}}@media(prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}{_hues()}{_RULES}"
    )


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())


def _hues() -> str:
    """Return the class of every colour: others take what they fill or draw from ``--hue``."""
    return "".join(f".{name}{{--hue:var(--{name})}}" for name in (*(f"c{n}" for n in range(8)), "idle", "ideal"))


_RULES = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:28px clamp(14px,3vw,40px) 60px;background:var(--page);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;font-variant-numeric:tabular-nums}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:44px 0 10px;padding-top:14px;border-top:1px solid var(--line)}
h3{font-size:.95rem;margin:16px 0 6px;font-weight:600}
p{margin:8px 0;max-width:75ch;overflow-wrap:anywhere}
.about,.quiet,figcaption{color:var(--quiet)}
figcaption,.quiet{font-size:.86rem;margin-top:8px}
.lead{font-size:1.02rem}
figure{margin:14px 0}
ul.plain{padding-left:1.2em;max-width:80ch;overflow-wrap:anywhere}
ul.plain li{margin:4px 0}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:20px 0 0}
dl div{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
dt{color:var(--quiet);font-size:.84rem}
dd{margin:0;font-size:1.3rem;font-weight:600;line-height:1.3;overflow-wrap:anywhere}
dd span{display:block;font-size:.84rem;font-weight:400;color:var(--quiet)}
svg{display:block;max-width:none;font-size:12px}
svg text{fill:var(--ink)}
svg .number,.wide>svg>text,.narrow>svg>text{fill:var(--quiet)}
svg text.strong{fill:var(--ink);font-weight:600}
.wide svg,.narrow svg{width:100%;height:auto}
.narrow{display:none}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 18px;margin:0 0 10px;padding:0;font-size:.86rem}
.legend li{display:flex;align-items:center}
.key{display:inline-block;width:18px;height:0;margin-right:7px;border-top:2.5px solid var(--hue,transparent)}
.key.dashed{border-top-style:dashed}
.key.area{width:13px;height:13px;border:1.5px solid var(--hue);border-radius:3px;vertical-align:-2px;
 background:color-mix(in srgb,var(--hue) 28%,transparent)}
.key.solid{background:var(--hue)}
.key.ring{width:11px;height:11px;border:2px solid var(--hue);border-radius:50%}
.key.diamond{width:9px;height:9px;border:0;background:var(--hue);transform:rotate(45deg)}
.grid{stroke:var(--line);stroke-width:1;fill:none}
.axis{stroke:var(--quiet);fill:none}
.stop{stroke:var(--ink);stroke-width:1.5;stroke-dasharray:2 4;fill:none}
.band{fill:var(--hue);fill-opacity:.18;stroke:none}
.curve{stroke:var(--hue);stroke-width:2.2;fill:none;stroke-linejoin:round;stroke-linecap:round}
.curve.dashed{stroke-dasharray:6 6;stroke-width:1.6}
.disc,.mark{fill:var(--hue);stroke:var(--page);stroke-width:1.2}
.ring{fill:var(--page);stroke:var(--hue);stroke-width:2}
.hit{fill:transparent}
.hit-line{fill:none;stroke:transparent;stroke-width:12}
.tip:hover>.disc,.tip:hover>.mark{stroke:var(--ink);stroke-width:2}
.solid{fill:var(--hue)}
.bar{margin:12px 0}
.bar .name{font-weight:600;font-size:.92rem}
.bar .name span{font-weight:400;color:var(--quiet)}
.bar .parts{font-size:.86rem;color:var(--quiet)}
.bar rect{stroke:var(--page);stroke-width:1}
.scroll{overflow-x:auto;max-width:100%}
.graph{border:1px solid var(--line);border-radius:8px;padding:6px}
.stage{fill:var(--hue);fill-opacity:.07;stroke:var(--hue);stroke-opacity:.45}
.edge{fill:none;stroke:var(--quiet);stroke-opacity:.5;stroke-width:1}
.edge.cut{stroke:var(--hue);stroke-opacity:.75}
.box>rect:first-child{fill:color-mix(in srgb,var(--hue) 16%,var(--page));stroke:var(--hue);stroke-width:1.2}
.box text{font-size:11px}
.box .share{fill:var(--hue)}
.tip:hover>rect:first-child,rect.tip:hover{stroke:var(--ink);stroke-width:1.8}
.tip:hover>.edge.cut{stroke-opacity:1}
.lanes{display:flex;border:1px solid var(--line);border-radius:8px;overflow:hidden}
.names{flex:none;padding:0 8px;border-right:1px solid var(--line);color:var(--quiet);font-size:12px;text-align:right}
.names div{height:34px;line-height:22px}
.view{flex:1;overflow-x:auto;overflow-y:hidden;min-width:0;padding:0 2px}
.lane{fill:var(--panel)}
.span{stroke:var(--page);stroke-width:.5}
.ticks{display:none}
.ticks.on{display:inline}
.in{display:none;font-size:10px;pointer-events:none}
.in.on{display:inline}
svg text.in{fill:var(--page);font-weight:600}
.tools{display:flex;flex-wrap:wrap;gap:8px;align-items:center;margin:0 0 8px;color:var(--quiet);font-size:.84rem}
.tools[hidden]{display:none}
button{font:inherit;color:var(--ink);background:var(--panel);border:1px solid var(--line);border-radius:6px;
 padding:3px 11px; cursor:pointer}
button:hover{border-color:var(--quiet)}
:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
table{border-collapse:collapse;font-size:.88rem;min-width:100%}
th,td{padding:5px 12px 5px 0;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line);
 vertical-align:baseline}
th{color:var(--quiet);font-weight:500}
.left{text-align:left}
td.left:last-child{white-space:normal;min-width:13em;max-width:40em;overflow-wrap:anywhere}
.left:last-child{padding-left:8px}
.chosen td{font-weight:600;background:var(--panel)}
.load{display:inline-flex;align-items:center;gap:8px;white-space:nowrap}
.unseen{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
details{margin:12px 0}
summary{cursor:pointer;color:var(--quiet);font-size:.9rem}
#tip{position:fixed;z-index:9;pointer-events:none;max-width:min(360px,90vw);padding:7px 11px;border-radius:7px;
 background:var(--ink);color:var(--page);font-size:.84rem;line-height:1.4;white-space:pre-line;overflow-wrap:anywhere}
#tip[hidden]{display:none}
footer{margin-top:48px;color:var(--quiet);font-size:.84rem}
@media(max-width:640px){.wide{display:none}.narrow{display:block}h1{font-size:1.35rem}body{padding-top:16px}
 .tools span{display:none}dl{grid-template-columns:repeat(auto-fit,minmax(130px,1fr))}}
@media(max-width:640px){.few td{padding-right:8px}
 .few td,.few td.left{white-space:normal;min-width:0;overflow-wrap:break-word}}
@media print{.tools{display:none}}
"""
