"""The name of an action in a turn's text: accepted, not guessed."""

import pytest

from trigon.environments.protocol import action_text, as_names, find_action

NAMES = as_names(["left", "right", "turn left", "Move_Forward", "no-op", "7"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("left", "left"),
        ("**Left**.", "left"),
        ("I go left, since the goal is there.", "left"),
        ("left, left and left again", "left"),
        ("Turn left!", "turn left"),
        ("move forward", "Move_Forward"),
        ("move-forward<|im_end|>", "Move_Forward"),
        ("no op", "no-op"),
        ("<think>left or right?</think>right", "right"),
        ("left or right?</think> right", "right"),
        ("<action>left</action> <action>right</action>", "right"),
        ("Not left. <action> Right </action> and left later", "right"),
    ],
)
def test_a_name_is_found(text, expected):
    assert find_action(text, NAMES) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "left or right",
        "bright",
        "77",
        "turn left, then left",
        "<think>I go left.</think>",
        "left <action></action>",
        "<action>jump</action> left",
    ],
)
def test_none_or_several_names_are_no_action(text):
    assert find_action(text, NAMES) is None


def test_the_text_of_an_action_is_what_follows_the_thoughts_or_is_tagged():
    assert action_text("<think>a</think> b <think>c</think> d ") == "b  d"
    assert action_text("x <action>\n go north </action> y") == "go north"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no actions"),
        (["left", " "], "has the name ' '"),
        (["turn left", "Turn_Left"], "'turn left' and 'Turn_Left' have the same name"),
    ],
)
def test_names_that_cannot_be_told_apart_are_refused(names, message):
    with pytest.raises(ValueError, match=message):
        as_names(names)
