"""The tool from a shell's point of view: dcp: cases shared out over ranks, exchanged, checked and timed."""

import json
import os
import struct
import unittest

from tool_testing import ToolTest, main, read_safetensors, run, write_safetensors

EXAMPLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "examples", "decode_step.safetensors")
STAGES = ("gather_us", "decode_push_us", "merge_us", "step_us")


class DcpTest(ToolTest):
    def case_of(self, name, *options):
        path = self.path(name)
        if not os.path.exists(path):
            self.succeed("gen", path, "--rows", 6, "--heads", 8, "--counts", "ragged", *options)
        return path

    def passes(self, path, ranks, *options):
        """The document of a run whose checks all pass."""
        document = self.succeed_json("dcp", path, "--ranks", ranks, "--steps", 6, *options)
        self.assertEqual(document["status"], "pass")
        self.assertTrue(document["float64"]["pass"])
        self.assertTrue(document["expected"]["pass"])
        self.assertIsNone(document["difference"])
        self.assertEqual((document["exchanges"], document["timed_exchanges"]), (6, 6))
        self.assertEqual([rank["rank"] for rank in document["ranks"]], list(range(ranks)))
        first_head = 0
        for rank in document["ranks"]:
            self.assertEqual(rank["first_head"], first_head)
            first_head += rank["heads"]
        return document


class Cases(DcpTest):
    def test_the_shipped_case(self):
        for ranks in (1, 2, 3, 8):
            document = self.passes(EXAMPLE, ranks)
            heads = [rank["heads"] for rank in document["ranks"]]
            self.assertEqual(sum(heads), 16)
            self.assertLessEqual(max(heads) - min(heads), 1)
        self.assertGreater(document["mailbox_bytes"], 0)

    def test_records_and_ranks(self):
        cases = [self.case_of("fp8", "--record", "fp8", "--width", 130),
                 self.case_of("v4", "--record", "fp8_v4", "--width", 90, "--sinks", "--lse", "log2"),
                 self.case_of("two", "--record", "fp8_v41", "--width", 128, "--extra-record", "nvfp4_v41",
                              "--extra-width", 33, "--one-list"),
                 self.case_of("split", "--record", "bf16", "--width", 70, "--split-rope", "--sinks"),
                 self.case_of("gaps", "--record", "fp8_ds_mla", "--width", 60, "--page-size", 8, "--slots-per-page", 11)]
        for path in cases:
            for ranks in (1, 2, 3, 8):
                self.passes(path, ranks)

    def test_token_ids(self):
        for world, rank in ((1, 0), (3, 2)):
            path = self.case_of(f"ids{world}", "--record", "fp8", "--width", 60, "--token-ids", "--world", world, "--rank",
                                rank)
            self.assertNotIn("slots", self.succeed_json("info", path)["tensors"])
            self.passes(path, 3)

    def test_uneven_heads(self):
        path = self.case_of("fp8", "--record", "fp8", "--width", 130)
        for heads in ("7,1", "1,7"):
            document = self.passes(path, 2, "--heads", heads)
            self.assertEqual(",".join(str(rank["heads"]) for rank in document["ranks"]), heads)
        self.passes(path, 3, "--heads", "2,5,1", "--by-calls")

    def test_interleave(self):
        path = self.case_of("fp8", "--record", "fp8", "--width", 130)
        columns = []
        for interleave in (1, 16, 4096):
            document = self.passes(path, 3, "--interleave", interleave)
            columns.append([rank["columns"] for rank in document["ranks"]])
            for of_rank in columns[-1]:
                self.assertLessEqual(of_rank["min"], of_rank["mean"])
                self.assertLessEqual(of_rank["mean"], of_rank["max"])
        rows = self.succeed_json("decode", path)["rows"]
        active = sum(row["active_columns"] for row in rows)
        for of_ranks in columns:
            self.assertAlmostEqual(sum(of_rank["mean"] for of_rank in of_ranks) * len(rows), active, places=6)
        self.assertNotEqual(columns[0], columns[1])
        self.assertEqual([of_rank["max"] for of_rank in columns[2][1:]], [0, 0], "one rank owns all tokens")

    def test_schedules(self):
        path = self.case_of("fp8", "--record", "fp8", "--width", 130)
        for options in (["--kernel", "reference"], ["--p-format", "e4m3", "--splits", 3], ["--by-calls", "--threads", 2],
                        ["--chunk", 32, "--columns", "interleaved", "--splits", 2, "--anchor", "chunk_max"]):
            document = self.passes(path, 2, "--device", "cpu", *options)
            self.assertEqual(document["by_calls"], "--by-calls" in options)
            self.assertEqual((document["device"], document["lockstep"]), ("cpu", False))

    def slots_of(self, header, payload, row, count):
        begin, width = header["slots"]["data_offsets"][0], header["slots"]["shape"][1]
        return [slot for slot in struct.unpack_from(f"<{count}i", payload, begin + 4 * width * row) if slot >= 0]

    def test_attended_nan(self):
        def change(header, payload):
            others = self.slots_of(header, payload, 0, 70)
            slot = next(slot for slot in self.slots_of(header, payload, 2, 9) if slot not in others)
            at = header["cache"]["data_offsets"][0] + 576 * slot
            payload[at : at + 576] = b"\x7f" * 576
            for name in ("expected.out", "expected.lse"):
                begin, end = header[name]["data_offsets"]
                for at in range(begin + 2 * (end - begin) // 3, end, 4):
                    struct.pack_into("<f", payload, at, float("nan"))

        path = self.corrupted("nan", change)
        rows = self.succeed_json("decode", path)["rows"]
        self.assertEqual([row["not_finite"] for row in rows], [0, 0, 4 * 512])
        for ranks in (1, 2, 4):
            self.passes(path, ranks)

    def test_attended_infinity(self):
        """Scores and values that are infinite in one head and row, where only NaN or what float64 says may come."""
        self.case_of("finite", "--record", "bf16", "--width", 40, "--no-expected")
        header, payload = read_safetensors(self.path("finite"))
        payload = bytearray(payload)
        row, count = max(((row["row"], row["active_columns"]) for row in self.succeed_json("decode", self.path("finite"))["rows"]),
                         key=lambda entry: entry[1])
        at = header["cache"]["data_offsets"][0] + 2 * 576 * self.slots_of(header, payload, row, count)[0]
        struct.pack_into("<H", payload, at, 0x7F80)
        path = self.path("infinite")
        write_safetensors(path, header, bytes(payload))
        decoded = self.succeed_json("decode", path)["rows"][row]
        self.assertGreater(decoded["not_finite"], 0)
        for ranks in (1, 3):
            document = self.succeed_json("dcp", path, "--ranks", ranks, "--steps", 6)
            self.assertIsNone(document["expected"])
            self.assertEqual(document["status"], "pass")


class Report(DcpTest):
    def test_text(self):
        text = self.succeed("dcp", EXAMPLE, "--ranks", 2, "--heads", "5,11", "--interleave", 16, "--device", "cpu")
        for word in ("3 rows x 16 heads", "fp8_ds_mla (656 bytes)", "2 by loopback, 5 + 11 heads", "(s / 16) % 2",
                     "schedule   cpu ", "not fused", "KiB a rank", "float64", "expected.*", "columns min/mean/max",
                     "20 exchanges, all bit-identical to the merged partial results", "decode + push", "slowest",
                     "includes waiting"):
            self.assertIn(word, text)
        self.assertNotIn("FAIL", text)
        self.assertIn("by calls: receive_query, decode, push", self.succeed("dcp", EXAMPLE, "--ranks", 1, "--by-calls"))

    def test_times(self):
        document = self.passes(EXAMPLE, 3, "--device", "cpu")
        for stage in STAGES:
            self.assertGreater(document["slowest"][stage], 0)
            for rank in document["ranks"]:
                self.assertGreater(rank["median"][stage], 0)
        self.assertLess(document["slowest"]["gather_us"], document["slowest"]["step_us"])

    def test_a_late_rank_shows_where_others_wait(self):
        late_us = 30_000
        for stage, own, waiting in (("gather", "gather_us", "decode_push_us"), ("push", "decode_push_us", "merge_us")):
            document = self.passes(EXAMPLE, 2, "--device", "cpu", "--late", f"1:{stage}:{late_us}")
            self.assertGreaterEqual(document["ranks"][1]["median"][own], late_us)
            self.assertGreater(document["ranks"][0]["median"][waiting], late_us / 2)

    def test_a_rank_that_waits_in_vain(self):
        message = self.refuse("dcp", EXAMPLE, "--ranks", 2, "--late", "1:gather:400000", "--wait-limit", 0.05, "--device",
                              "cpu", mentions=["--wait-limit", "0.05 s", "decode has waited in vain for rank 1"])
        self.assertIn("got rank 0: exchange 0", message)

    def test_wrong_expected(self):
        def change(header, payload):
            at = header["expected.out"]["data_offsets"][0] + 4 * 3
            (value,) = struct.unpack_from("<f", payload, at)
            struct.pack_into("<f", payload, at, value + 1)

        path = self.corrupted("wrong_out", change)
        result = run("dcp", path, "--ranks", 2)
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        for word in ("PASS", "FAIL", "got ", "not timed"):
            self.assertIn(word, result.stdout)
        document = json.loads(run("dcp", path, "--ranks", 2, "--json").stdout)
        self.assertEqual((document["status"], document["timed_exchanges"]), ("fail", 0))
        self.assertTrue(document["float64"]["pass"])
        self.assertFalse(document["expected"]["pass"])
        self.assertIsNone(document["slowest"])


class Refusals(DcpTest):
    def test_ranks(self):
        self.refuse("dcp", self.case, mentions=["--ranks"])
        self.refuse("dcp", "--ranks", 2, mentions=["CASE"])
        for ranks in ("0", "17", "two"):
            self.refuse("dcp", self.case, "--ranks", ranks, mentions=["--ranks", ranks])
        self.refuse("dcp", self.case, "--ranks", 5, mentions=["ranks", "a head for each", 4, 5])

    def test_heads(self):
        for heads in ("2,1", "1,1,2", "4,0", "4", "2;2", "", ",", "5,-1"):
            if heads != "":
                self.refuse("dcp", self.case, "--ranks", 2, f"--heads={heads}", mentions=["--heads"])

    def test_provider(self):
        self.refuse("dcp", EXAMPLE, "--ranks", 2, "--provider", "nccl", mentions=["--provider", "loopback", "nccl"])
        self.refuse("dcp", EXAMPLE, "--ranks", 2, "--provider", "torch", mentions=["--provider", "torch"])

    def test_late(self):
        for late in ("2:gather:5", "-1:gather:5", "0:gather", "gather", "0:none:5", "0:send:5", "0:push:-1", "0:push:nan",
                     "0:push:1e9", "0:push:5us", ":push:5", "0:push:5:6"):
            self.refuse("dcp", self.case, "--ranks", 2, f"--late={late}", mentions=["--late", late])

    def test_numbers(self):
        for option, value in (("--interleave", "0"), ("--steps", "0"), ("--wait-limit", "0"), ("--wait-limit", "nan")):
            self.refuse("dcp", self.case, "--ranks", 2, option, value, mentions=[option, value])

    def test_files_and_devices(self):
        self.refuse("dcp", self.path("missing"), "--ranks", 2, mentions=["missing"])
        self.refuse("dcp", self.case, "--ranks", 2, "--device", "cuda:99", mentions=["cuda:99"])
        self.refuse("dcp", self.case, "--ranks", 2, "--device", "cpu", "--kernel", "decode_wide", mentions=["decode_wide"])


DEVICE = os.environ.get("SPARSEMLA_TEST_DEVICE", "cpu")


@unittest.skipIf(DEVICE == "cpu", "SPARSEMLA_TEST_DEVICE names no GPU")
class Gpu(DcpTest):
    def test_lockstep(self):
        for options in ([], ["--by-calls"], ["--kernel", "decode_balanced"], ["--interleave", 16]):
            for ranks in (1, 2, 8):
                document = self.passes(EXAMPLE, ranks, "--device", DEVICE, *options)
                self.assertEqual((document["device"], document["lockstep"]), (DEVICE, True))
                for rank in document["ranks"]:
                    self.assertGreater(rank["median"]["gather_us"], 0)
                    self.assertLess(rank["median"]["step_us"], 1000)
        self.assertIn("without waiting", self.succeed("dcp", EXAMPLE, "--ranks", 2, "--device", DEVICE))


if __name__ == "__main__":
    main()
