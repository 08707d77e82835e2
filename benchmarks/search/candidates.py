"""Candidates of the search, by grid."""

from __future__ import annotations

from search.spec import Spec

PEERS = {
    "chunkkv": "pool=avg:7,share=1,chunk=20,sinks=0,blocks=0",
    "chunkkv-w64": "window=64,pool=avg:5,share=1,chunk=20,sinks=0,blocks=0",
    "snapkv-avg21": "pool=avg:21,sinks=0,blocks=0",
    "snapkv-max21": "pool=max:21,sinks=0,blocks=0",
    "snapkv-avg7": "pool=avg:7,sinks=0,blocks=0",
}
"""Methods as published, tuned, every layer compressed, storage to the token."""

DEFAULT = {"kvsieve-0.1": "pool=max:7,full=0-2", "kvsieve-0.1-all": "pool=max:7"}

AWARE = {
    **PEERS,
    **DEFAULT,
    "max11": "pool=max:11",
    "max15": "pool=max:15",
    "max21": "pool=max:21",
    "max31": "pool=max:31",
    "max45": "pool=max:45",
    "max63": "pool=max:63",
    "avg21": "pool=avg:21",
    "avg31": "pool=avg:31",
    "avg45": "pool=avg:45",
    "avg21avg21": "pool=avg:21+avg:21",
    "max21avg21": "pool=max:21+avg:21",
    "avg7max21": "pool=avg:7+max:21",
    "left15right5": "pool=max:15:5",
    "left5right15": "pool=max:5:15",
    "w8": "window=8,pool=max:21",
    "w16": "window=16,pool=max:21",
    "w64": "window=64,pool=max:21",
    "recent16": "recent=16,pool=max:21",
    "reducemax": "reduce=max,pool=max:21",
    "share5": "share=0.5,pool=max:21",
    "share1": "share=1,pool=max:21",
    "share1avg21": "share=1,pool=avg:21",
    "headsmax": "heads=max,pool=max:21",
    "headssum": "heads=sum,pool=max:21",
    "headsmaxshare1": "heads=max,share=1,pool=max:21",
    "headssumshare1": "heads=sum,share=1,pool=max:21",
    "sq": "agg=sq,pool=max:21",
    "aggmax": "agg=max,pool=max:21",
    "lin": "agg=lin,pool=max:21",
    "vnorm": "value=norm,pool=max:21",
    "wo": "value=wo,pool=max:21",
    "critical": "value=wo,two=0.5,pool=max:21",
    "chunk8": "chunk=8,pool=max:21",
    "chunk16max": "chunk=16,stat=max",
    "chunk32max": "chunk=32,stat=max",
    "chunk16maxshare1": "chunk=16,stat=max,share=1",
    "chunk20own": "chunk=20,pool=avg:7",
    "chunk20share1": "chunk=20,pool=avg:7,share=1",
    "chunk32share1": "chunk=32,pool=avg:7,share=1",
    "chunk20top4share1": "chunk=20,stat=top4,share=1",
    "mix1": "mix=0.1,pool=max:21",
    "mix2": "mix=0.2,pool=max:21",
    "full0": "full=0,pool=max:21",
    "full0-2": "full=0-2,pool=max:21",
    "slope5": "slope=0.5,pool=max:21",
    "slope-5": "slope=-0.5,pool=max:21",
    "sinks0": "sinks=0,pool=max:21",
}

REFINED = {
    "sum-avg15-w16": "window=16,pool=avg:15",
    "sum-avg15-w32": "pool=avg:15",
    "sq-avg15-w16": "window=16,agg=sq,pool=avg:15",
    "sq-avg15-w32": "agg=sq,pool=avg:15",
    "max-avg15-w16": "window=16,agg=max,pool=avg:15",
    "max-avg15-w32": "agg=max,pool=avg:15",
    "sum-avg21-w16": "window=16,pool=avg:21",
    "sum-avg21-w32": "pool=avg:21",
    "sq-avg21-w16": "window=16,agg=sq,pool=avg:21",
    "sq-avg21-w32": "agg=sq,pool=avg:21",
    "max-avg21-w16": "window=16,agg=max,pool=avg:21",
    "max-avg21-w32": "agg=max,pool=avg:21",
    "sum-avg31-w16": "window=16,pool=avg:31",
    "sum-avg31-w32": "pool=avg:31",
    "sq-avg31-w16": "window=16,agg=sq,pool=avg:31",
    "sq-avg31-w32": "agg=sq,pool=avg:31",
    "max-avg31-w16": "window=16,agg=max,pool=avg:31",
    "max-avg31-w32": "agg=max,pool=avg:31",
    "sq-avg21-vn": "agg=sq,value=norm,pool=avg:21",
    "max-avg21-vn": "agg=max,value=norm,pool=avg:21",
    "sum-avg21-vn": "value=norm,pool=avg:21",
    "sq-avg21-w16-vn": "window=16,agg=sq,value=norm,pool=avg:21",
    "sq-avg21-wo": "agg=sq,value=wo,pool=avg:21",
    "sq-avg21-crit": "agg=sq,value=wo,pool=avg:21,two=0.5",
    "sq-avg21-hmax": "agg=sq,heads=max,pool=avg:21",
    "sq-avg21-hsum": "agg=sq,heads=sum,pool=avg:21",
    "sq-avg21-rmax": "agg=sq,reduce=max,pool=avg:21",
    "sq-avg21-s5": "agg=sq,share=0.5,pool=avg:21",
    "sq-avg21-ns5": "agg=sq,share=0.5,norm=sum,pool=avg:21",
    "sq-avg21-s1": "agg=sq,share=1.0,pool=avg:21",
    "sq-avg11x2": "agg=sq,pool=avg:11+avg:11",
    "sq-avg15x2": "agg=sq,pool=avg:15+avg:15",
    "sq-avg7max21": "agg=sq,pool=avg:7+max:21",
    "sq-max7avg21": "agg=sq,pool=max:7+avg:21",
    "sq-max21": "agg=sq,pool=max:21",
    "sq-max15": "agg=sq,pool=max:15",
    "sq-avg21-mix1": "agg=sq,pool=avg:21,mix=0.1",
    "sq-avg21-mix2": "agg=sq,pool=avg:21,mix=0.2",
    "sq-avg21-r16": "recent=16,agg=sq,pool=avg:21",
    "sq-avg21-r8": "recent=8,agg=sq,pool=avg:21",
    "sq-avg21-full0": "agg=sq,pool=avg:21,full=0",
    "sq-avg21-slope3": "agg=sq,pool=avg:21,slope=0.3",
    "sq-avg21-slope-3": "agg=sq,pool=avg:21,slope=-0.3",
    "sq-avg21-w64r32": "window=64,recent=32,agg=sq,pool=avg:21",
    "sq-avg21-w8": "window=8,agg=sq,pool=avg:21",
    "sq-avg21-sinks0": "agg=sq,pool=avg:21,sinks=0",
    "sq-chunk8-avg21": "agg=sq,pool=avg:21,chunk=8",
    "max-avg21-hmax": "agg=max,heads=max,pool=avg:21",
    "sq-left13right7": "agg=sq,pool=avg:13:7",
    "sum-avg21-r8": "recent=8,pool=avg:21",
    "max-avg21-r8": "recent=8,agg=max,pool=avg:21",
    "sum-avg21-r8-vn": "recent=8,value=norm,pool=avg:21",
    "sq-avg21-r8-vn": "recent=8,agg=sq,value=norm,pool=avg:21",
    "max-avg21-r8-vn": "recent=8,agg=max,value=norm,pool=avg:21",
    "sq-avg31-r8": "recent=8,agg=sq,pool=avg:31",
    "sq-both7-21-r8": "recent=8,agg=sq,pool=both:7:21",
    "sq-tent21-r8": "recent=8,agg=sq,pool=tent:21",
    "sq-tent31-r8": "recent=8,agg=sq,pool=tent:31",
    "sum-tent31-r8": "recent=8,pool=tent:31",
    "sq-w64-r8": "window=64,recent=8,agg=sq,pool=avg:21",
    "sq-w48-r8": "window=48,recent=8,agg=sq,pool=avg:21",
    "sum-both7-21-r8": "recent=8,pool=both:7:21",
    "max-both7-21-r8": "recent=8,agg=max,pool=both:7:21",
    "sq-avg25-r8-vn": "recent=8,agg=sq,value=norm,pool=avg:25",
    "sq-avg17-r8-vn": "recent=8,agg=sq,value=norm,pool=avg:17",
    "sq-avg21-r16-vn": "recent=16,agg=sq,value=norm,pool=avg:21",
    "sq-avg21-r8-wo": "recent=8,agg=sq,value=wo,pool=avg:21",
    "sq-avg21-r8-vn-rmax": "recent=8,agg=sq,value=norm,reduce=max,pool=avg:21",
    "sq-avg21-r8-vn-hsum": "recent=8,agg=sq,value=norm,heads=sum,pool=avg:21",
    "sq-avg21-r8-vn-s3": "recent=8,agg=sq,value=norm,share=0.3,pool=avg:21",
    "sq-avg21-r8-vn-mix1": "recent=8,agg=sq,value=norm,pool=avg:21,mix=0.1",
}
"""Around the best of the first grid."""

AGNOSTIC = {
    "keydiff": "source=keydiff,recent=0,sinks=0,blocks=0",
    "keydiff-safe": "source=keydiff,recent=32",
    "kd-r8": "source=keydiff,recent=8",
    "kd-avg3": "source=keydiff,recent=32,pool=avg:3",
    "kd-avg7": "source=keydiff,recent=32,pool=avg:7",
    "kd-avg15": "source=keydiff,recent=32,pool=avg:15",
    "kd-avg31": "source=keydiff,recent=32,pool=avg:31",
    "kd-max7": "source=keydiff,recent=32,pool=max:7",
    "kd-max15": "source=keydiff,recent=32,pool=max:15",
    "kd-share1": "source=keydiff,recent=32,share=1.0,norm=sum",
    "kd-share1avg7": "source=keydiff,recent=32,share=1.0,norm=sum,pool=avg:7",
    "kd-share1avg21": "source=keydiff,recent=32,share=1.0,norm=sum,pool=avg:21",
    "kd-chunk16share1": "source=keydiff,recent=32,share=1.0,norm=sum,chunk=16",
    "kd-vnorm": "source=keydiff,recent=32,value=norm",
    "kd-wo-avg7": "source=keydiff,recent=32,value=wo,pool=avg:7",
    "kd-full0": "source=keydiff,recent=32,full=0",
    "ld-avg7": "source=localdiff,recent=32,pool=avg:7",
    "ld-share1avg7": "source=localdiff,recent=32,share=1.0,norm=sum,pool=avg:7",
    "sample-max": "source=sample,recent=32,agg=max,pool=avg:7",
    "sample-sq-avg21": "source=sample,recent=32,agg=sq,pool=avg:21",
    "sample-max-vn21": "source=sample,recent=32,agg=max,value=norm,pool=avg:21",
    "snap+kd5": "pool=max:7,mix=0.5",
    "kd-avg7-r8": "source=keydiff,recent=8,pool=avg:7",
    "kd-avg15-r8": "source=keydiff,recent=8,pool=avg:15",
    "kd-avg21-r8": "source=keydiff,recent=8,pool=avg:21",
    "kd-avg31-r8": "source=keydiff,recent=8,pool=avg:31",
    "kd-max15-r8": "source=keydiff,recent=8,pool=max:15",
    "kd-s1avg7-r8": "source=keydiff,recent=8,share=1.0,norm=sum,pool=avg:7",
    "kd-s1avg15-r8": "source=keydiff,recent=8,share=1.0,norm=sum,pool=avg:15",
    "kd-s1avg21-r8": "source=keydiff,recent=8,share=1.0,norm=sum,pool=avg:21",
    "kd-s5avg15-r8": "source=keydiff,recent=8,share=0.5,norm=sum,pool=avg:15",
    "kd-avg15wo-r8": "source=keydiff,recent=8,value=wo,pool=avg:15",
    "kd-avg15vn-r8": "source=keydiff,recent=8,value=norm,pool=avg:15",
    "kd-avg9x2-r8": "source=keydiff,recent=8,pool=avg:9+avg:9",
    "kd-s1avg15vn-r8": "source=keydiff,recent=8,value=norm,share=1.0,norm=sum,pool=avg:15",
    "kd-avg7vn-r8": "source=keydiff,recent=8,value=norm,pool=avg:7",
    "kd-avg7wo-r8": "source=keydiff,recent=8,value=wo,pool=avg:7",
    "kd-avg11vn-r8": "source=keydiff,recent=8,value=norm,pool=avg:11",
    "kd-avg11wo-r8": "source=keydiff,recent=8,value=wo,pool=avg:11",
    "kd-avg9x2vn-r8": "source=keydiff,recent=8,value=norm,pool=avg:9+avg:9",
    "kd-avg9x2wo-r8": "source=keydiff,recent=8,value=wo,pool=avg:9+avg:9",
    "kd-avg5x2vn-r8": "source=keydiff,recent=8,value=norm,pool=avg:5+avg:5",
    "kd-avg21vn-r8": "source=keydiff,recent=8,value=norm,pool=avg:21",
}

KNOWN = {**AWARE, **REFINED, **AGNOSTIC}

EXACT = {
    "exact-sq-avg21-r8-vn": "blocks=0,recent=8,agg=sq,value=norm,pool=avg:21",
}
"""The finalist stored to the token, as the peers are: what rounding to blocks costs it."""

FINAL_AWARE = EXACT | {
    name: KNOWN[name]
    for name in (
        "chunkkv",
        "snapkv-avg21",
        "snapkv-max21",
        "kvsieve-0.1-all",
        "sq-avg21-r8",
        "sq-avg21-r8-vn",
    )
}
"""What held-out cases are asked of: chosen on the search's cases alone."""

FINAL_AGNOSTIC = {name: KNOWN[name] for name in ("keydiff", "kd-avg7vn-r8", "kd-avg11vn-r8")}

GRIDS = {
    "peers": PEERS,
    "default": DEFAULT,
    "aware": AWARE,
    "refined": REFINED,
    "agnostic": AGNOSTIC,
    "final-aware": FINAL_AWARE,
    "final-agnostic": FINAL_AGNOSTIC,
}
"""Candidates by the name that `--grid` takes; a candidate's name means one spec in all of them."""


def parsed(grid: dict[str, str]) -> dict[str, Spec]:
    """A grid with its specs read."""
    return {name: Spec.parse(text) for name, text in grid.items()}
