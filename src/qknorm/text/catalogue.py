"""The data sets this project knows: where they are published, with which checksums, and under which licences."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from qknorm.errors import InputError
from qknorm.text import layouts
from qknorm.text.download import Source

TED = "Qi et al. 2018, When and Why Are Pre-trained Word Embeddings Useful for Neural Machine Translation?, NAACL"
TED_LICENCE = "CC BY-NC-ND 4.0 (TED talks)"
TED_SOURCE = Source(
    # In 2026 the authors' site answered with a web page instead; the second address asks the Web Archive for its copy.
    addresses=(
        "http://phontron.com/data/ted_talks.tar.gz",
        "https://web.archive.org/web/2024id_/http://phontron.com/data/ted_talks.tar.gz",
    ),
    checksum="sha256:03457b9ebc6d60839f1a48c5a03c940266aff78b81fcda4c6d9e2a5a7fb670ae",
    size=352_222_045,
)
STANFORD = "https://nlp.stanford.edu/projects/nmt/data/iwslt15.en-vi/"
MULTI30K = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"


@dataclass(frozen=True)
class Corpus:
    """One data set. `arrange` turns the downloaded files, by name, into `split.lang` files in a folder."""

    name: str
    languages: tuple[str, ...]
    what: str
    splits: tuple[str, ...]
    sources: tuple[Source, ...]
    licence: str
    citation: str
    arrange: layouts.Arrange
    short_codes: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that a whole copy has; one `input.txt` if the corpus is a text of one language."""
        if len(self.languages) == 1:
            return ("input.txt",)
        return tuple(f"{split}.{language}" for split in self.splits for language in self.languages)


def _ted(source: str, target: str) -> Corpus:
    return Corpus(
        name=f"ted-{source}-{target}",
        languages=(source, target),
        what="TED talks, Moses-tokenised",
        splits=("train", "dev", "test"),
        sources=(TED_SOURCE,),
        licence=TED_LICENCE,
        citation=TED,
        arrange=layouts.ted(source, target),
    )


def _plain(base: str, files: Mapping[str, tuple[str, str]]) -> tuple[tuple[Source, ...], layouts.Arrange]:
    """Sources that are single files, {file there: (file here, checksum)}, and the way to arrange them."""
    sources = tuple(Source((base + there,), checksum) for there, (_, checksum) in files.items())
    return sources, layouts.plain({there: here for there, (here, _) in files.items()})


_iwslt15_sources, _iwslt15_arrange = _plain(
    STANFORD,
    {
        "train.en": ("train.en", "sha256:c26dfeed74b6bf3752f5ca552f2412456f0de153f7c804df8717931fb3a5c78a"),
        "train.vi": ("train.vi", "sha256:707206edf2dc0280273952c7b70544ea8a1363aa69aaeb9d70514b888dc3067d"),
        "tst2012.en": ("dev.en", "sha256:b8fbcd0d4199d41276421d1f7228298df67dd9e2c5c134c2ee8cdf3ec27801e2"),
        "tst2012.vi": ("dev.vi", "sha256:01004078b3f36b0c46e81b65fc6851230b3c823405c76d1d82ef3b786b512ff0"),
        "tst2013.en": ("test.en", "sha256:3860ce60bc5b85d96cc2d3d580cf1bc9d62440e939c1b964676d3607c4e8f1df"),
        "tst2013.vi": ("test.vi", "sha256:29af16842808da2812b8fd4d47fc05d082ba870e60ab7755090ad04b380994cd"),
    },
)
_multi30k_sources, _multi30k_arrange = _plain(
    MULTI30K,
    {
        "train.en.gz": ("train.en", "md5:0065d13af80720a55ca8153d126e6627"),
        "train.de.gz": ("train.de", "md5:81ff90b99829c0cd4b1b587d394afd39"),
        "val.en.gz": ("dev.en", "md5:2b69aa9253948ac9f67e94917272dd40"),
        "val.de.gz": ("dev.de", "md5:6e0e229eb049e3fc99a1ef02fb2d5f91"),
        "test_2016_flickr.en.gz": ("test.en", "md5:ff2c0fcb4893a13bd73414306bc250ae"),
        "test_2016_flickr.de.gz": ("test.de", "md5:efd67d314d98489b716b145475101932"),
        "test_2017_flickr.en.gz": ("test2017.en", "md5:005396bac545d880abe6f00bbb7dbbb4"),
        "test_2017_flickr.de.gz": ("test2017.de", "md5:6a8d5c87f6ae19e3d35681aa6fd16571"),
    },
)
_shakespeare_sources, _shakespeare_arrange = _plain(
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",
    {"input.txt": ("input.txt", "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed")},
)
_FLORES_CODES = {
    "ar": "arb_Arab",
    "de": "deu_Latn",
    "en": "eng_Latn",
    "gl": "glg_Latn",
    "he": "heb_Hebr",
    "sk": "slk_Latn",
    "vi": "vie_Latn",
}

CORPORA: Mapping[str, Corpus] = {
    corpus.name: corpus
    for corpus in (
        _ted("gl", "en"),
        _ted("sk", "en"),
        _ted("ar", "en"),
        _ted("en", "he"),
        Corpus(
            name="iwslt15-en-vi",
            languages=("en", "vi"),
            what="TED talks of IWSLT'15, Moses-tokenised; dev is tst2012, test is tst2013",
            splits=("train", "dev", "test"),
            sources=_iwslt15_sources,
            licence=TED_LICENCE,
            citation="Luong and Manning 2015, Stanford Neural Machine Translation Systems for Spoken Language Domains",
            arrange=_iwslt15_arrange,
        ),
        Corpus(
            name="iwslt14-de-en",
            languages=("de", "en"),
            what="TED talks of IWSLT'14, raw text; dev is every 23rd training pair, test five sets of 2010 to 2012",
            splits=("train", "dev", "test"),
            sources=(Source(("https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",)),),
            licence=TED_LICENCE,
            citation="Cettolo et al. 2014, Report on the 11th IWSLT Evaluation Campaign",
            arrange=layouts.iwslt14,
        ),
        Corpus(
            name="multi30k-en-de",
            languages=("en", "de"),
            what="picture captions, raw text; test is Flickr 2016, test2017 Flickr 2017",
            splits=("train", "dev", "test", "test2017"),
            sources=_multi30k_sources,
            licence="the terms of Flickr30K: research and education, not commercial",
            citation="Elliott et al. 2016, Multi30K: Multilingual English-German Image Descriptions",
            arrange=_multi30k_arrange,
        ),
        Corpus(
            name="flores",
            languages=tuple(_FLORES_CODES.values()),
            what="FLORES-200, the same sentences in some 200 languages, raw text, for evaluation only",
            splits=("dev", "devtest"),
            sources=(
                Source(
                    ("https://dl.fbaipublicfiles.com/nllb/flores200_dataset.tar.gz",),
                    "sha256:b8b0b76783024b85797e5cc75064eb83fc5288b41e9654dabc7be6ae944011f6",
                    size=25_585_843,
                ),
            ),
            licence="CC BY-SA 4.0",
            citation="NLLB Team 2022, No Language Left Behind: Scaling Human-Centered Machine Translation",
            arrange=layouts.flores,
            short_codes=_FLORES_CODES,
        ),
        Corpus(
            name="tinyshakespeare",
            languages=("en",),
            what="1,115,394 characters of plays, for a character language model",
            splits=("input",),
            sources=_shakespeare_sources,
            licence="public domain",
            citation="Karpathy 2015, The Unreasonable Effectiveness of Recurrent Neural Networks",
            arrange=_shakespeare_arrange,
        ),
    )
}


def find(name: str) -> Corpus:
    """The corpus of that name; an unknown name is an error that suggests the nearest."""
    if name not in CORPORA:
        raise InputError(f"no corpus is called {name!r}{suggestion(name, CORPORA)}")
    return CORPORA[name]


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, else some that are known."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {nearest[0]!r}?" if nearest else f": known are {', '.join(names[:20])}"
