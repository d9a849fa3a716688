"""What the end-to-end tests of the command-line tool share: tool_*_test.py path/to/sparsemla [unittest options]."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

TOOL = ""

# A short benchmark.
BENCH = ["bench", "--device", "cpu", "--filter", "fp8_512", "--repeat", 3, "--threads", 1]


def tool():
    """The path of the program under test."""
    return TOOL


def run(*arguments, **options):
    """The finished process, with its output as text. A hang is a failure."""
    return subprocess.run([TOOL, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)


def read_safetensors(path):
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return header, data[8 + length :]


def write_safetensors(path, header, payload):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + payload)


class ToolTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.mkdtemp(prefix="sparsemla-tool-")
        cls.case = os.path.join(cls.directory, "small.safetensors")
        result = run("gen", cls.case, "--record", "fp8", "--rows", 3, "--heads", 4, "--width", 70, "--counts", "70,0,9")
        assert result.returncode == 0, result.stderr

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.directory)

    def path(self, name):
        return os.path.join(self.directory, name)

    def succeed(self, *arguments, **options):
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, 0, f"{arguments}: {result.stdout}{result.stderr}")
        self.assertEqual(result.stderr, "", arguments)
        return result.stdout

    def succeed_json(self, *arguments):
        return json.loads(self.succeed(*arguments, "--json"))

    def refuse(self, *arguments, mentions=(), **options):
        """Status 2, nothing on stdout, one line on stderr that names what is wrong."""
        result = run(*arguments, **options)
        self.assertEqual(result.returncode, 2, f"{arguments}: {result.stdout}{result.stderr}")
        self.assertEqual(result.stdout, "", arguments)
        lines = result.stderr.splitlines()
        self.assertEqual(len(lines), 1, f"{arguments}: {result.stderr}")
        self.assertTrue(lines[0].startswith("sparsemla: error: "), lines[0])
        for text in mentions:
            self.assertIn(str(text), lines[0], arguments)
        return lines[0]

    def corrupted(self, name, change):
        """A copy of the small case whose header and payload went through `change`."""
        header, payload = read_safetensors(self.case)
        payload = bytearray(payload)
        change(header, payload)
        write_safetensors(self.path(name), header, bytes(payload))
        return self.path(name)


def main():
    """Runs the tests of the program that was started; its first argument is the tool."""
    global TOOL
    TOOL = os.path.abspath(sys.argv.pop(1))
    unittest.main(module="__main__")
