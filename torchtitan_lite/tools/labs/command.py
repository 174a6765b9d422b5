"""Run `lab`: learn distributed training by predicting numbers, and by writing and repairing code. Options:
command_lines.py."""

from argparse import Namespace
from pathlib import Path

from torchtitan_lite.config.messages import UserError, name_command
from torchtitan_lite.tools.environment import continue_with_packages
from torchtitan_lite.tools.labs import working_copy
from torchtitan_lite.tools.labs.lab import Lab, compute_answer, find_lab, list_labs, read_quantity

TOLERANCE = 0.02  # allowed relative error of a prediction; a count must be exact


def main(options: Namespace) -> int:
    """List the labs, print a lab, judge an answer, or start or judge a working copy. Return 1 if the answer or
    the code in the working copy is wrong."""
    if options.number is None:
        for lab in list_labs():
            print(f"  {lab.number:2}  {lab.title}")
        print(f"\nRead one: {name_command('lab 1')}")
        return 0
    lab = find_lab(options.number)
    folder = Path("outputs") / "labs" / str(lab.number)
    if options.action is None:
        text = lab.text.replace("./run_train.sh", name_command("train"))
        print(text.replace("python3 -m torchtitan_lite ", name_command("")))
        return 0
    if options.action == "answer":
        return judge_answer(lab, options)
    if options.name is not None:
        raise UserError(
            f"{options.name!r} has no effect here. Write: lab {lab.number} answer NAME VALUE"
        )
    if options.action == "start":
        working_copy.start(lab, folder)
        print(f"The working copy is {folder}. Then: {name_command(f'lab {lab.number} check')}")
        return 0
    continue_with_packages()
    status = working_copy.judge_work(lab, folder)
    print(f"lab {lab.number}: {'not yet' if status else 'solved'}")
    return 1 if status else 0


def judge_answer(lab: Lab, options: Namespace) -> int:
    """Compare an answer with the output of the tool. Return 0 if the answer is right, else 1."""
    if options.name is None or options.value is None:
        names = ", ".join(lab.questions)
        raise UserError(f"Write: lab {lab.number} answer NAME VALUE. The names are {names}.")
    told = read_quantity(options.value)
    right = compute_answer(lab, options.name)
    value = read_quantity(right)
    ratio = told / value
    is_count = right.replace(",", "").isdecimal() and value < 10_000
    tolerance = 0.0 if is_count else TOLERANCE
    if abs(ratio - 1) <= tolerance:
        command, _ = lab.questions[options.name]
        print(f"right: {right}. See: {name_command(command)}")
        return 0
    print(f"{ratio:.3g} times the right answer.")
    for slip, factor, hint in lab.slips:
        if slip == options.name and abs(ratio / float(factor) - 1) < 0.02:
            print(hint)
    return 1
