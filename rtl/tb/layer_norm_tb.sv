// Checks layer_norm.sv against a folder of `qflash vectors --trace`. Channels come with pauses between them in every other row.
`include "case.svh"
`ifdef PARAM_norm_shift
`define PARAM_shift `PARAM_norm_shift
`endif
`ifndef PARAM_shift  // a normalisation without gain and offset
`define PARAM_shift 1
`endif
`ifdef IN_gain_FILE
`define OUT_WIDTH `STEP_y_WIDTH
`else
`define OUT_WIDTH 32
`endif

module layer_norm_tb;
    localparam int SIZE = `STEP_h_SIZE;
    localparam int CHANNELS = `CONST_row_channels;
    localparam int OUT = `OUT_WIDTH;
    localparam int INDEX = CHANNELS > 1 ? $clog2(CHANNELS) : 1;

    logic clk = 1'b0, reset = 1'b1, in_valid = 1'b0, in_ready, out_valid;
    logic [15:0] inputs[0:SIZE-1];
    logic [31:0] gains[0:CHANNELS-1];
    logic [31:0] offsets[0:CHANNELS-1];
    logic [`STEP_N_WIDTH-1:0] wanted_N[0:SIZE-1];
    logic [OUT-1:0] wanted[0:SIZE-1];
    logic signed [15:0] h;
    logic [INDEX-1:0] channel;
    logic signed [31:0] gain, offset, normalised;
    logic signed [OUT-1:0] y;
    int values = 0, mismatches = 0, cycles = 0, sent = 0;

    layer_norm #(
        .CHANNELS(CHANNELS), .OUT(OUT), .INVERSE(`CONST_row_inverse), .BITS(`CONST_row_bits), .ROOT(`CONST_row_root),
        .SHIFT(`CONST_row_shift)
    ) dut (.epsilon(47'(`PARAM_epsilon)), .shift(5'(`PARAM_shift)), .*);
    always #5 clk = ~clk;
    always @(posedge clk) cycles++;
    assign gain = gains[channel];
    assign offset = offsets[channel];

    always @(posedge clk) if (out_valid) begin
        if (normalised !== 32'($signed(wanted_N[values]))) begin
            mismatches++;
            $display("N %0d: %0d, not %0d", values, normalised, $signed(wanted_N[values]));
        end
`ifdef IN_gain_FILE
        if (y !== wanted[values]) begin
            mismatches++;
            $display("y %0d: %0d, not %0d", values, y, $signed(wanted[values]));
        end
`endif
        values++;
    end

    initial begin
        $readmemh(`STEP_h_FILE, inputs);
        $readmemh(`STEP_N_FILE, wanted_N);
        for (int i = 0; i < CHANNELS; i++) begin
            gains[i] = 32'd0;
            offsets[i] = 32'd0;
        end
`ifdef IN_gain_FILE
        $readmemh(`IN_gain_FILE, gains);
        $readmemh(`IN_offset_FILE, offsets);
        $readmemh(`STEP_y_FILE, wanted);
`endif
        @(negedge clk);
        @(negedge clk);
        reset = 1'b0;
        while (sent < SIZE) begin
            in_valid = (sent / CHANNELS) % 2 == 0 || $urandom % 3 != 0;
            h = inputs[sent];
            #1;
            if (in_valid && in_ready) sent++;
            @(negedge clk);
        end
        in_valid = 1'b0;
        for (int wait_for = 0; values < SIZE && wait_for < 3 * CHANNELS + 100; wait_for++) @(negedge clk);
        $display("%0d values, %0d mismatches, %0d cycles", values, mismatches + SIZE - values, cycles - 2);
        $finish;
    end
endmodule
