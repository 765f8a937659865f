"""The words and sentences that the built-in pairs are made of."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Mary John Anna Paul Lisa Mark Emma Peter Sarah David Laura James Alice Robert Julia Thomas Karen Daniel "
    "Rachel Simon Maria Michael Helen Kevin Susan Steven Amy Eric Jane Adam Kate Brian Ruth Frank Linda George "
    "Diana Henry Nancy Martin Claire Jack Sophie Ben Grace Tom Lucy Sam Rose Alex"
)
PLACES = _words("market library museum garden station harbor school office theater beach")
THINGS = _words("book ring letter ticket coat lamp map key picture basket")

# In each, two people meet, one of them is named again, and what follows can only be the other one.
MEETINGS = (
    "After {first} and {second} met at the {place}, {S2} handed a {thing} to",
    "While {first} and {second} were walking to the {place}, {S2} offered a {thing} to",
    "When {first} and {second} came back from the {place}, {S2} sent a {thing} to",
    "At noon {first} and {second} left the {place}, and there {S2} passed a {thing} to",
    "On the way to the {place}, {first} and {second} rested for a while before {S2} gave a {thing} to",
    "Because {first} and {second} had lost their way to the {place}, {S2} showed a {thing} to",
    "Last week {first} and {second} worked late at the {place}. In the end {S2} lent a {thing} to",
    "Nobody but {first} and {second} was still in the {place}, so {S2} brought a {thing} to",
)

# For each relation its sentences, and its facts as "subject:answer".
FACTS = {
    "capital": (
        (
            "The capital of {subject.name} is the city of",
            "People who visit {subject.name} usually begin in its capital,",
            "The government of {subject.name} has its seat in the capital city of",
        ),
        "France:Paris Italy:Rome Spain:Madrid Germany:Berlin England:London Russia:Moscow Japan:Tokyo China:Beijing "
        "Greece:Athens Egypt:Cairo Austria:Vienna Ireland:Dublin Portugal:Lisbon Sweden:Stockholm Norway:Oslo "
        "Denmark:Copenhagen Poland:Warsaw Hungary:Budapest Turkey:Ankara Iran:Tehran Iraq:Baghdad Thailand:Bangkok "
        "Cuba:Havana Peru:Lima Chile:Santiago Canada:Ottawa Australia:Canberra Kenya:Nairobi Finland:Helsinki "
        "Belgium:Brussels Syria:Damascus Lebanon:Beirut Afghanistan:Kabul Scotland:Edinburgh Wales:Cardiff "
        "Bulgaria:Sofia Romania:Bucharest Indonesia:Jakarta Philippines:Manila Vietnam:Hanoi",
    ),
    "language": (
        (
            "Most people in {subject.name} grow up speaking",
            "The newspapers of {subject.name} are printed in",
            "To read a street sign in {subject.name}, one has to know some",
        ),
        "France:French Italy:Italian Spain:Spanish Germany:German England:English Russia:Russian Japan:Japanese "
        "China:Chinese Greece:Greek Egypt:Arabic Portugal:Portuguese Sweden:Swedish Norway:Norwegian Denmark:Danish "
        "Poland:Polish Hungary:Hungarian Turkey:Turkish Iran:Persian Thailand:Thai Vietnam:Vietnamese "
        "Netherlands:Dutch Finland:Finnish Korea:Korean Ukraine:Ukrainian Brazil:Portuguese Mexico:Spanish",
    ),
    "continent": (
        (
            "On a map of the world, {subject.name} is found in",
            "Among the countries of the world, {subject.name} lies in",
        ),
        "France:Europe Italy:Europe Spain:Europe Germany:Europe Poland:Europe Hungary:Europe Norway:Europe "
        "Sweden:Europe Finland:Europe Denmark:Europe Japan:Asia China:Asia India:Asia Vietnam:Asia Thailand:Asia "
        "Korea:Asia Nepal:Asia Pakistan:Asia Egypt:Africa Kenya:Africa Nigeria:Africa Ghana:Africa Uganda:Africa "
        "Ethiopia:Africa Libya:Africa Morocco:Africa",
    ),
    "opposite": (
        (
            "What is not {subject.name} is",
            "The exact opposite of {subject.name} is",
            "The two words mean the reverse of each other: {subject.name} and",
        ),
        "hot:cold cold:hot big:small small:big fast:slow slow:fast good:bad bad:good high:low low:high light:dark "
        "old:young young:old rich:poor poor:rich strong:weak weak:strong wet:dry dry:wet early:late late:early "
        "long:short short:long open:closed happy:sad full:empty empty:full left:right right:left wide:narrow "
        "thick:thin sharp:dull deep:shallow true:false false:true clean:dirty black:white",
    ),
}

EVENTS = _words("war siege strike drought famine journey voyage trial project dispute alliance rebellion")
LASTING = (
    "The {event} lasted from the year {start.year} to the year {century.century}",
    "It is known that the {event} began in {start.year} and came to its end in {century.century}",
)

NOUNS = _words(
    "key:keys author:authors dog:dogs teacher:teachers doctor:doctors farmer:farmers student:students "
    "child:children man:men woman:women girl:girls boy:boys friend:friends car:cars house:houses tree:trees "
    "bird:birds horse:horses cat:cats king:kings book:books picture:pictures table:tables chair:chairs door:doors "
    "box:boxes ship:ships artist:artists writer:writers manager:managers"
)
VERBS = ("is:are", "was:were", "has:have")
NEARBY = tuple(f"The {{subject}} {where} the {{other}}" for where in ("near", "behind", "next to", "in front of"))
