"""Plain English texts for ``qflash-lab real``: pairs that say much the same, so that nearest neighbours mean something."""

from __future__ import annotations

PAIRS = (
    ("The train to the coast leaves at seven in the morning.", "Every day at seven a train departs for the seaside."),
    ("She planted tomatoes and beans behind the house.", "There are beans and tomatoes growing in her back garden."),
    ("The bridge was closed after the storm.", "Strong winds forced the city to shut the bridge."),
    ("He learned to play the violin as a child.", "As a boy he took violin lessons."),
    ("Our meeting has been moved to Thursday afternoon.", "We will meet on Thursday after lunch instead."),
    ("The cat slept on the warm windowsill all day.", "All afternoon the cat lay in the sun by the window."),
    ("Bread needs flour, water, salt and yeast.", "You bake a loaf from flour, yeast, water and a little salt."),
    ("The new museum shows paintings from the sixteenth century.", "Old paintings hang in the museum that just opened."),
    ("Rain is expected in the north tomorrow.", "The forecast says that it will be wet in the north."),
    ("The company sold more electric cars than last year.", "Sales of the firm's battery cars have gone up."),
    ("A doctor told him to walk more and eat less sugar.", "On medical advice he cut down on sweets and goes for walks."),
    ("The program stops with an error when the file is missing.", "If it cannot find the file, the software crashes."),
    ("Children under six travel free of charge.", "No ticket is needed for a child younger than six."),
    ("The river has flooded the fields near the village.", "Water from the river covers the farmland around the village."),
    ("They climbed the mountain in two days.", "It took them two days to reach the summit."),
    ("Light travels faster than sound.", "We see lightning before we hear the thunder, since sound is slower."),
    ("The library lends books for four weeks.", "You may keep a borrowed book for a month."),
    ("Her brother works as a pilot for an airline.", "The man who flies passenger planes is her brother."),
    ("The team won the final by one goal.", "With a single goal more they took the championship."),
    ("Please switch off the lights when you leave.", "The last one out should turn the lamps off."),
    ("Coffee prices rose because of a poor harvest.", "A bad crop has made coffee more expensive."),
    ("The telescope found a planet around a distant star.", "Astronomers discovered a world that orbits a faraway sun."),
    ("He forgot his umbrella on the bus.", "His umbrella was left behind on public transport."),
    ("The old factory will become an apartment building.", "Flats are to be built inside the former plant."),
)  # fmt: skip

SENTENCES = tuple(sentence for pair in PAIRS for sentence in pair)
"""All of them, a pair side by side."""

_LENGTH = 10
PARAGRAPHS = tuple(
    " ".join((SENTENCES * 2)[start : start + _LENGTH]) for start in range(0, len(SENTENCES), 2)
)  # fmt: skip
"""Ten sentences after one another, beginning at each pair: about 120 tokens, on which attention is harder to quantise."""
