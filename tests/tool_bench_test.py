"""The tool from a shell's point of view: bench, runs on a GPU, and case files of other makers."""

import csv
import io
import json
import os
import unittest
import xml.etree.ElementTree

from tool_testing import BENCH, ToolTest, main, read_safetensors


class Bench(ToolTest):
    def test_json_and_plot(self):
        plot = self.path("plot.svg")
        document = self.succeed_json(*BENCH, "--plot", plot)
        self.assertEqual(list(document), ["version", "suite", "repeat", "limits", "timings"])
        self.assertGreater(document["limits"]["fma_flop_per_s"], 0)
        self.assertGreater(document["limits"]["read_bytes_per_s"], 0)
        for timing in document["timings"]:
            self.assertLessEqual(timing["p10_s"], timing["median_s"])
            self.assertLessEqual(timing["median_s"], timing["p90_s"])
            self.assertGreater(timing["limit_percent"], 0)
        root = xml.etree.ElementTree.parse(plot).getroot()
        labels = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        for timing in document["timings"]:
            self.assertIn(timing["problem"], labels)

    def test_json_file(self):
        path = self.path("timings.json")
        text = self.succeed(*BENCH, "--json", path)
        self.assertIn("wrote " + path, text)
        with open(path, encoding="utf-8") as file:
            self.assertEqual(json.load(file)["repeat"], 3)
        self.refuse(*BENCH, "--json", self.path("missing/timings.json"), mentions=["missing/timings.json"])

    def test_gpu_suites_need_a_gpu(self):
        for arguments in (["--suite", "latency"], ["--sweep"]):
            self.refuse("bench", "--device", "cpu", *arguments, mentions=["--device", "GPU", "'cpu'"])
            self.refuse("bench", "--device", "cuda:99", *arguments, mentions=["cuda:99"])
        for option in ("--minutes", "--resume", "--write-table"):
            self.refuse("bench", option, "1", mentions=[option, "--sweep"])
        self.refuse("bench", "--suite", "latency", "--csv", mentions=["--csv", "--json"])
        self.refuse("bench", "--baseline", "x", mentions=["--baseline", "latency"])

    def test_csv(self):
        rows = list(csv.DictReader(io.StringIO(self.succeed(*BENCH, "--csv"))))
        self.assertTrue(rows)
        for row in rows:
            self.assertGreater(float(row["median_us"]), 0)
            self.assertIn("chunk=", row["schedule"])

    def test_table(self):
        text = self.succeed(*BENCH)
        for word in ("median", "p10", "p90", "GB/s", "GFLOP/s", "of limit", "limits measured now"):
            self.assertIn(word, text)


DEVICE = os.environ.get("SPARSEMLA_TEST_DEVICE", "cpu")


@unittest.skipIf(DEVICE == "cpu", "SPARSEMLA_TEST_DEVICE names no GPU")
class Gpu(ToolTest):
    def test_check(self):
        (case,) = self.succeed_json("check", "--device", DEVICE, "--kernel", "all", self.case)["cases"]
        self.assertTrue(case["runs"])
        self.assertEqual({run["device"] for run in case["runs"]}, {DEVICE})
        for kernel in ("cpu", "reference"):
            self.assertNotIn(kernel, [refusal["kernel"] for refusal in case["declined"]])

    def test_auto_checks_every_device(self):
        (case,) = self.succeed_json("check", "--kernel", "all", self.case)["cases"]
        self.assertLessEqual({DEVICE, "cpu"}, {run["device"] for run in case["runs"]})
        self.assertEqual(case["declined"], [])

    def test_decode(self):
        document = self.succeed_json("decode", self.case, "--device", DEVICE)
        self.assertEqual(document["device"], DEVICE)
        self.assertEqual([row["active_columns"] == 0 for row in document["rows"]], [False, True, False])
        self.assertEqual(document["rows"][1]["lse_max"], "-inf")
        self.assertGreater(document["seconds"], 0)

    def test_tiling(self):
        problem = ["--record", "fp8", "--heads", 64, "--width", 256, "--device", DEVICE, "--tile-heads", 32, "--stages", 2]
        document = self.succeed_json("plan", *problem, "--transport", "bulk", "--trigger", "end")
        self.assertEqual(document["tiling"], {"heads": 32, "stages": 2, "cluster_tiles": 1, "gather": "copies",
                                              "transport": "bulk", "trigger": "end"})
        self.refuse("plan", *problem[:-1], 5, mentions=["stages must be 1 .. "])
        results = []
        for tiling in (["--tile-heads", 16], ["--tile-heads", 32, "--transport", "bulk", "--stages", 2], ["--trigger", "start"]):
            output = self.path("tiling" + str(len(results)))
            self.succeed("decode", self.case, "--device", DEVICE, "--splits", 2, *tiling, "-o", output)
            results.append(read_safetensors(output)[1])
        self.assertEqual(results[0], results[1])
        self.assertEqual(results[0], results[2])

    def test_latency(self):
        path, plot = self.path("latency.json"), self.path("latency.svg")
        text = self.succeed("bench", "--suite", "latency", "--device", DEVICE, "--shape", "goal/fp8_5", "--repeats", 3,
                            "--json", path, "--plot", plot)
        for word in ("clocks", "device copy", "of floor", "goal/fp8_576/h96/r5/256of2048"):
            self.assertIn(word, text)
        with open(path, encoding="utf-8") as file:
            document = json.load(file)
        self.assertEqual(len(document["timings"]), 11)
        for timing in document["timings"]:
            self.assertIsNone(timing["refused"])
            self.assertGreater(timing["cold"]["median_us"], timing["floor_us"])
            self.assertGreater(timing["warm"]["median_us"], document["empty_launch_us"])
        xml.etree.ElementTree.parse(plot)

    def test_sweep(self):
        log, table = self.path("sweep.jsonl"), self.path("table.inc")
        sweep = ["bench", "--sweep", "--device", DEVICE, "--minutes", 0.05, "--resume", log, "--write-table", table]
        self.assertIn("again with --resume", self.succeed(*sweep))
        with open(log, encoding="utf-8") as file:
            first = file.read().splitlines()
        self.assertGreater(len(first), 8)
        self.succeed(*sweep)
        with open(log, encoding="utf-8") as file:
            self.assertEqual(file.read().splitlines()[:len(first)], first)
        with open(table, encoding="utf-8") as file:
            rows = [line for line in file if line.startswith("{")]
        self.assertGreater(len(rows), 1)

    def test_bench(self):
        timings = self.succeed_json("bench", "--device", DEVICE, "--filter", "fp8_576/h16/r8", "--repeat", 3)["timings"]
        self.assertTrue(timings)
        for timing in timings:
            self.assertEqual((timing["device"], timing["limit"]), (DEVICE, ""))


def shared_cases():
    """Case files of other makers, where a folder of them lies beside the source tree."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "shared", "cases")
    if not os.path.isdir(folder):
        return []
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".safetensors"))


class SharedCases(ToolTest):
    @unittest.skipUnless(shared_cases(), "no folder of shared cases")
    def test_all_pass(self):
        self.assertIn("all pass", self.succeed("check", "--device", "cpu", "--kernel", "all", *shared_cases()))


if __name__ == "__main__":
    main()
