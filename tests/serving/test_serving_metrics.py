"""The text that Prometheus reads."""

import re

from qknorm.serving.metrics import Counter, Histogram, Metrics

SAMPLE = re.compile(r'[a-z_]+(\{([a-z]+="([^"\\]|\\.)*",?)+\})? (\+Inf|-?\d+(\.\d+)?(e[+-]?\d+)?)')


def test_a_counter_counts_by_labels_and_escapes_them():
    counter = Counter("a_total", "about")
    counter.add(path='a"\\\n')
    counter.add(2.5, path="b")
    counter.add(path="b")
    assert counter.lines() == ['a_total{path="a\\"\\\\\\n"} 1', 'a_total{path="b"} 3.5']


def test_buckets_of_a_histogram_hold_all_that_is_not_larger():
    histogram = Histogram("h", "about", (1, 2.5))
    for value in (0.5, 1, 2, 3):
        histogram.observe(value)
    assert histogram.lines() == [
        'h_bucket{le="1"} 2',
        'h_bucket{le="2.5"} 3',
        'h_bucket{le="+Inf"} 4',
        "h_sum 6.5",
        "h_count 4",
    ]


def test_every_line_is_a_comment_or_a_sample():
    metrics = Metrics()
    metrics.saw_request("/translate", 200, 0.03)
    metrics.saw_batch("gl-en", 3, 0.02)
    metrics.saw_drop("client left")
    metrics.gauge("now", "A number.", lambda: 0.5)
    text = metrics.text()
    assert text.endswith("\n")
    for line in text.splitlines():
        assert re.fullmatch(r"# (HELP|TYPE) [a-z_]+ .+", line) or SAMPLE.fullmatch(line), line
    assert 'qknorm_sentences_total{pair="gl-en"} 3\n' in text and "\nnow 0.5\n" in text
