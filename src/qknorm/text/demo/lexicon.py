"""The words of the demo corpus. Each Galician word has one English translation, so that a source has one reference."""

from dataclasses import dataclass

from qknorm.text.demo.grammar import feminize, pluralize_english, pluralize_galician


@dataclass(frozen=True)
class Noun:
    """A noun of both languages; its kind says which verbs and adjectives go with it."""

    galician: str
    feminine: bool
    english: str
    english_plural: str
    kind: str

    @property
    def galician_plural(self) -> str:
        return pluralize_galician(self.galician)


@dataclass(frozen=True)
class Adjective:
    """An adjective, the copula it takes (ser or estar), its English comparative if any, and the kinds it describes."""

    galician: str
    copula: str
    english: str
    comparative: str
    kinds: tuple[str, ...]

    def agree(self, feminine: bool, plural: bool) -> str:
        """The Galician form for a gender and a number."""
        form = feminize(self.galician) if feminine else self.galician
        return pluralize_galician(form) if plural else form


@dataclass(frozen=True)
class Verb:
    """A verb of both languages, the kinds of its objects, and the tenses it is used in: all, simple or present."""

    galician: str
    english: str
    english_past: str = ""
    objects: tuple[str, ...] = ()
    tenses: str = "all"


@dataclass(frozen=True)
class Place:
    """Where something can be: a noun, and the English preposition for the Galician en."""

    noun: Noun
    preposition: str


def _read_nouns(kind: str, entries: str) -> tuple[Noun, ...]:
    """Entries such as `o home man/men`, separated by commas; the article tells the gender."""
    nouns = []
    for entry in entries.split(","):
        article, galician, english = entry.split(maxsplit=2)
        singular, _, plural = english.partition("/")
        nouns.append(Noun(galician, article == "a", singular, plural or pluralize_english(singular), kind))
    return tuple(nouns)


def _read_adjectives(copula: str, kinds: str, entries: str) -> tuple[Adjective, ...]:
    """Entries such as `caro expensive (more expensive)`, separated by commas."""
    adjectives = []
    for entry in entries.split(","):
        galician, english = entry.split(maxsplit=1)
        english, _, comparative = english.partition(" (")
        adjectives.append(Adjective(galician, copula, english, comparative.rstrip(")"), tuple(kinds.split())))
    return tuple(adjectives)


def _read_verbs(objects: str, entries: str, tenses: str = "all") -> tuple[Verb, ...]:
    """Entries such as `mercar buy/bought` or `buscar look for`, separated by commas."""
    verbs = []
    for entry in entries.split(","):
        galician, english = entry.split(maxsplit=1)
        english, _, past = english.partition("/")
        verbs.append(Verb(galician, english, past, tuple(objects.split()), tenses))
    return tuple(verbs)


def _read_pairs(entries: str) -> tuple[tuple[str, str], ...]:
    """Entries such as `onte = yesterday`, separated by commas."""
    pairs = (entry.split(" = ") for entry in entries.split(","))
    return tuple((galician.strip(), english.strip()) for galician, english in pairs)


PARENTS = _read_nouns("parent", "o pai father, a nai mother, o avó grandfather, a avoa grandmother")
PEOPLE = _read_nouns(
    "person",
    "o neno boy, a nena girl, o home man/men, a muller woman/women, o mestre teacher, a mestra teacher,"
    "o médico doctor, a médica doctor, o amigo friend, a amiga friend, o veciño neighbour, a veciña neighbour,"
    "o irmán brother, a irmá sister, o fillo son, a filla daughter, o tío uncle, a tía aunt,"
    "o alumno pupil, a alumna pupil, o camareiro waiter, a camareira waitress, o mariñeiro sailor, o labrego farmer,"
    "o panadeiro baker, o carteiro postman/postmen, o soldado soldier, o rei king, a raíña queen, o príncipe prince,"
    "a princesa princess, a enfermeira nurse, o avogado lawyer, a avogada lawyer, o escritor writer, o pintor painter,"
    "o músico musician, o bombeiro firefighter, o rapaz lad",
)
_JOBS = (
    "teacher doctor waiter waitress sailor farmer baker postman soldier nurse "
    "lawyer writer painter musician firefighter"
)
PROFESSIONS = tuple(noun for noun in PEOPLE if noun.english in _JOBS.split())
_KIN = "brother sister son daughter uncle aunt friend neighbour"
KIN = tuple(noun for noun in PEOPLE if noun.english in _KIN.split())
ANYONE = ("person", "person", "person", "person", "parent")
ANIMALS = _read_nouns(
    "animal",
    "o can dog, o gato cat, o cabalo horse, a vaca cow, a ovella sheep/sheep, a galiña hen, o pato duck, o porco pig,"
    "o paxaro bird, o rato mouse/mice, o lobo wolf/wolves, o raposo fox, o oso bear, o coello rabbit, o burro donkey,"
    "a cabra goat, a bolboreta butterfly, o león lion, o elefante elephant, a formiga ant",
)
FOODS = _read_nouns(
    "food",
    "a mazá apple, a laranxa orange, a pera pear, o ovo egg, a pataca potato/potatoes, o tomate tomato/tomatoes,"
    "a cebola onion, a galleta biscuit, o bocadillo sandwich, o plátano banana, o amorodo strawberry, a cereixa cherry",
)
DISHES = _read_nouns(
    "dish", "o pan bread, o queixo cheese, a carne meat, o arroz rice, a sopa soup, o peixe fish, a froita fruit"
)
DRINKS = _read_nouns("drink", "a auga water, o leite milk, o viño wine, o café coffee, o zume juice, a cervexa beer")
TEXTS = _read_nouns(
    "text",
    "o libro book, a carta letter, o xornal newspaper, a revista magazine, o poema poem, o conto tale, a novela novel,"
    "a mensaxe message",
)
THINGS = _read_nouns(
    "thing",
    "a mesa table, a cadeira chair, a cama bed, a lámpada lamp, o reloxo clock, a chave key, o caderno notebook,"
    "o teléfono telephone, o ordenador computer, a cámara camera, o xoguete toy, a pelota ball, a boneca doll,"
    "o mapa map, o cadro painting, o espello mirror, o anel ring, a flor flower, a pedra stone, a bandeira flag",
)
OPENABLES = _read_nouns("openable", "a porta door, a xanela window")
CONTAINERS = _read_nouns("container", "a caixa box, a bolsa bag, a botella bottle, a maleta suitcase")
TABLEWARE = _read_nouns(
    "tableware", "o coitelo knife/knives, a culler spoon, o garfo fork, o prato plate, o vaso glass"
)
CLOTHES = _read_nouns(
    "clothes",
    "a chaqueta jacket, a camisa shirt, o vestido dress, o zapato shoe, o sombreiro hat, o abrigo coat, a saia skirt",
)
VEHICLES = _read_nouns("vehicle", "o coche car, a bicicleta bicycle, o barco boat, o camión lorry")
TRANSPORT = _read_nouns("transport", "o tren train, o autobús bus, o avión plane")
BUILDINGS = _read_nouns("building", "a casa house, a torre tower, a ponte bridge, o castelo castle")
MASS_KINDS = ("dish", "drink")

_PLACE_TABLE = {
    "in": "a cociña kitchen, o xardín garden, o parque park, a praza square, a rúa street, a aldea village,"
    "a vila town, a cidade city, o bosque forest, o cuarto room, a biblioteca library,"
    "a igrexa church, o museo museum, a fábrica factory, a oficina office, a tenda shop",
    "at": "a escola school, a estación station, o aeroporto airport, o mercado market, a universidade university,"
    "o teatro theatre, o cine cinema, o restaurante restaurant, o hotel hotel, o hospital hospital, o porto harbour",
    "on": "a praia beach, a illa island, o monte mountain",
}
PLACES = tuple(
    Place(noun, preposition) for preposition, entries in _PLACE_TABLE.items() for noun in _read_nouns("place", entries)
)
SURFACES = tuple(Place(noun, "on") for noun in THINGS if noun.galician in ("mesa", "cadeira", "cama"))
INSIDES = tuple(Place(noun, "in") for noun in CONTAINERS if noun.galician != "botella")
_OUTDOORS = "monte illa aldea vila cidade bosque porto praia"
OUTDOORS = tuple(place for place in PLACES if place.noun.galician in _OUTDOORS.split())
_PATHS = "bosque vila cidade aldea parque xardín"
PATHS = tuple(place.noun for place in PLACES if place.noun.galician in _PATHS.split())
CITIES = _read_pairs(
    "Vigo = Vigo, Lugo = Lugo, Ourense = Ourense, A Coruña = A Coruña, Pontevedra = Pontevedra, Lisboa = Lisbon,"
    "Londres = London, París = Paris"
)
FEMALE_NAMES = ("Ana", "María", "Lucía", "Uxía", "Sabela", "Carme")
MALE_NAMES = ("Xoán", "Pedro", "Breixo", "Antón", "Iago", "Martiño")

NOUNS = (
    *(
        *PARENTS,
        *PEOPLE,
        *ANIMALS,
        *FOODS,
        *DISHES,
        *DRINKS,
        *TEXTS,
        *THINGS,
        *OPENABLES,
        *CONTAINERS,
        *TABLEWARE,
        *CLOTHES,
    ),
    *(*VEHICLES, *TRANSPORT, *BUILDINGS, *(place.noun for place in PLACES)),
)
NOUNS_BY_KIND = {kind: tuple(noun for noun in NOUNS if noun.kind == kind) for kind in {noun.kind for noun in NOUNS}}

_OBJECTS = "thing openable container tableware clothes vehicle"
ADJECTIVES = (
    *_read_adjectives("ser", f"text {_OBJECTS} building", "novo new (newer), feo ugly (uglier), moderno modern"),
    *_read_adjectives(
        "ser",
        _OBJECTS,
        "vermello red, azul blue, verde green, amarelo yellow, branco white, negro black, gris grey, marrón brown,"
        "pesado heavy (heavier)",
    ),
    *_read_adjectives("ser", f"text {_OBJECTS} food", "caro expensive (more expensive), barato cheap (cheaper)"),
    *_read_adjectives(
        "ser",
        f"person animal place food {_OBJECTS} building",
        "pequeno small (smaller), fermoso beautiful (more beautiful)",
    ),
    *_read_adjectives("ser", f"animal place food {_OBJECTS} transport building", "grande big (bigger)"),
    *_read_adjectives("ser", f"person animal place text {_OBJECTS} transport building", "vello old (older)"),
    *_read_adjectives("ser", "person building", "alto tall (taller)"),
    *_read_adjectives("ser", "animal vehicle transport", "rápido fast (faster), lento slow (slower)"),
    *_read_adjectives("ser", "text", "longo long (longer), curto short (shorter), interesante interesting"),
    *_read_adjectives("ser", "text", "difícil difficult (more difficult), fácil easy (easier)"),
    *_read_adjectives(
        "ser",
        "person",
        "intelixente clever, amable kind (kinder), famoso famous (more famous), rico rich (richer),"
        "pobre poor (poorer), simpático friendly (friendlier), serio serious, preguiceiro lazy (lazier),"
        "galego Galician, francés French, inglés English, alemán German, español Spanish, portugués Portuguese",
    ),
    *_read_adjectives("ser", "person animal", "forte strong (stronger), débil weak (weaker), valente brave (braver)"),
    *_read_adjectives("ser", "place", "tranquilo quiet"),
    *_read_adjectives("estar", "person animal", "canso tired, enfermo ill, contento happy, triste sad"),
    *_read_adjectives("estar", "person", "nervioso nervous, enfadado angry, ocupado busy"),
    *_read_adjectives("estar", "tableware clothes vehicle building", "limpo clean (cleaner), sucio dirty (dirtier)"),
    *_read_adjectives("estar", "thing tableware clothes", "roto broken"),
    *_read_adjectives("estar", "openable container", "aberto open, pechado closed"),
    *_read_adjectives("estar", "dish drink", "quente hot, frío cold"),
)
ADJECTIVES_BY_KIND = {
    kind: tuple(adjective for adjective in ADJECTIVES if kind in adjective.kinds) for kind in NOUNS_BY_KIND
}

TRANSITIVE_VERBS = (
    *_read_verbs("food dish", "comer eat/ate, probar taste, cortar cut/cut, cociñar cook"),
    *_read_verbs("drink", "beber drink/drank"),
    *_read_verbs("text", "ler read/read, escribir write/wrote, recibir receive"),
    *_read_verbs(
        "food dish drink text thing container tableware clothes vehicle", "mercar buy/bought, vender sell/sold"
    ),
    *_read_verbs("dish drink food", "preparar prepare, pagar pay for/paid"),
    *_read_verbs("text thing container tableware clothes vehicle", "roubar steal/stole"),
    *_read_verbs("text thing container tableware clothes vehicle", "atopar find/found", tenses="simple"),
    *_read_verbs("thing tableware vehicle", "usar use"),
    *_read_verbs("thing clothes text", "perder lose/lost, esquecer forget/forgot", tenses="simple"),
    *_read_verbs("tableware clothes vehicle", "lavar wash, limpar clean"),
    *_read_verbs("openable container", "abrir open, pechar close"),
    *_read_verbs("tableware thing", "romper break/broke, coller take/took"),
    *_read_verbs("building vehicle openable", "pintar paint"),
    *_read_verbs("animal building vehicle", "debuxar draw/drew"),
    *_read_verbs("container thing tableware clothes", "levar carry, gardar keep/kept"),
    *_read_verbs("food dish drink text", "traer bring/brought"),
    *_read_verbs("animal building place", "fotografar photograph"),
)
_SEIZED = "comer beber mercar vender atopar perder lavar limpar abrir pechar romper gardar"
PRONOUN_VERBS = tuple(verb for verb in TRANSITIVE_VERBS if verb.galician in _SEIZED.split())
HAVING = Verb("ter", "have", "had", ("animal", "text", "thing", "clothes", "vehicle", "tableware"), tenses="simple")
WANTING = Verb("querer", "want", "", ("food", "drink", "dish", "text", "thing", "clothes", "vehicle"), tenses="present")
PERSON_VERBS = (
    *_read_verbs(
        " ".join(ANYONE),
        "chamar call, esperar wait for, visitar visit, convidar invite, bicar kiss, abrazar hug, escoitar listen to,"
        "buscar look for, mirar look at",
    ),
    *_read_verbs(" ".join(ANYONE), "ver see/saw, entender understand/understood", tenses="simple"),
    *_read_verbs(" ".join(ANYONE), "coñecer know", tenses="present"),
)
GIVING_VERBS = _read_verbs(
    "text food thing clothes", "mandar send/sent, regalar give/gave, amosar show, prestar lend/lent"
)
INTRANSITIVE_VERBS = _read_verbs(
    "",
    "durmir sleep/slept, correr run/ran, nadar swim/swam, cantar sing/sang, bailar dance, xogar play, chorar cry,"
    "traballar work, estudar study, camiñar walk, descansar rest, falar speak/spoke, gritar shout, viaxar travel",
)
LIVING = Verb("vivir", "live", tenses="simple")
GOING = Verb("ir", "go", "went")
ARRIVALS = _read_verbs("", "chegar arrive, volver return")
REFLEXIVE_VERBS = _read_verbs(
    "", "levantar get up/got, deitar go to bed/went, sentar sit down/sat, duchar shower, queixar complain"
)
SAYING_VERBS = _read_verbs("", "dicir say, pensar think, saber know, crer believe", tenses="present")

LANGUAGES = _read_pairs(
    "galego = Galician, inglés = English, francés = French, portugués = Portuguese, alemán = German, español = Spanish"
)
GAMES = _read_pairs("ao fútbol = football, ao tenis = tennis, ao xadrez = chess, ás cartas = cards")
INSTRUMENTS = _read_pairs(
    "a guitarra = the guitar, o piano = the piano, o violín = the violin, a frauta = the flute, a gaita = the bagpipes"
)
MEANS = _read_pairs(
    "en coche = by car, en tren = by train, en autobús = by bus, en barco = by boat, en avión = by plane"
)
COMPANIONS = _read_pairs(
    "comigo = with me, contigo = with you, con el = with him, con ela = with her, connosco = with us,"
    "convosco = with you, con eles = with them, con elas = with them"
)
BODY_PARTS = (
    *_read_nouns("one", "a cabeza head, a man hand, a perna leg, a barriga belly"),
    *_read_nouns("many", "o pé foot/feet, o ollo eye, o dente tooth/teeth, a orella ear"),
)
STATES = _read_pairs(
    "fame = hungry, sede = thirsty, sono = sleepy, frío = cold, medo = afraid, présa = in a hurry, razón = right"
)
RELATIVE_POSITIONS = _read_pairs(
    "debaixo de = under, detrás de = behind, diante de = in front of, preto de = near, ao lado de = next to"
)
WEEKDAYS = _read_pairs(
    "luns = Monday, martes = Tuesday, mércores = Wednesday, xoves = Thursday, venres = Friday, sábado = Saturday,"
    "domingo = Sunday"
)
PAST_TIMES = (
    *_read_pairs("onte = yesterday, antonte = the day before yesterday, onte pola noite = last night"),
    *_read_pairs("a semana pasada = last week, o mes pasado = last month, o ano pasado = last year"),
    *((f"o {galician} pasado", f"last {english}") for galician, english in WEEKDAYS),
)
FUTURE_TIMES = (
    *_read_pairs("mañá = tomorrow, pasado mañá = the day after tomorrow, a semana que vén = next week"),
    *_read_pairs("o mes que vén = next month, o ano que vén = next year"),
    *((f"o {galician}", f"on {english}") for galician, english in WEEKDAYS),
)
HABITUAL_TIMES = (
    *_read_pairs("todos os días = every day, todas as semanas = every week, pola mañá = in the morning"),
    *_read_pairs("pola tarde = in the afternoon, pola noite = at night"),
    *((f"os {galician.rstrip('s')}s", f"on {english}s") for galician, english in WEEKDAYS),
)
PRESENT_TIMES = _read_pairs("agora = now, hoxe = today")
MANNERS = _read_pairs("ben = well, mal = badly, amodo = slowly, moito = a lot")
