// Checks attention_row.sv against a folder of `qflash vectors --trace`: every query of every head and image, one after the other.
// Of outputs that are floats numerator and denominator are looked at. Keys and values come with pauses in every other row.
`include "case.svh"
`ifdef IN_bias_FILE  // of a network
`define IN_mask_FILE `IN_bias_FILE
`define IN_mask_WIDTH `IN_bias_WIDTH
`define IN_mask_SIZE `IN_bias_SIZE
`define IN_mask_D0 `IN_bias_D0
`define IN_mask_D1 `IN_bias_D1
`define IN_mask_D2 `IN_bias_D2
`define IN_mask_D3 `IN_bias_D3
`endif
`ifndef PARAM_causal
`define PARAM_causal 0
`endif
`ifdef STEP_O_with_the_missing_mass_FILE
`define NUMERATOR_FILE `STEP_O_with_the_missing_mass_FILE
`define DENOMINATOR_FILE `STEP_L_or_l_FILE
`else
`define NUMERATOR_FILE `STEP_O_FILE
`define DENOMINATOR_FILE `STEP_l_FILE
`endif

module attention_row_tb;
    localparam int BATCH = `STEP_query_D0, HEADS = `STEP_query_D1, QUERIES = `STEP_query_D2, CHANNELS = `STEP_query_D3;
    localparam int KEYS = `STEP_key_D2, VALUES = `STEP_value_D3;
    localparam int INDEX = VALUES > 1 ? $clog2(VALUES) : 1;

    logic clk = 1'b0, reset = 1'b1;
    logic [7:0] query_data[0:`STEP_query_SIZE-1];
    logic [7:0] key_data[0:`STEP_key_SIZE-1];
    logic [7:0] value_data[0:`STEP_value_SIZE-1];
    // those as the ports take them
    logic [8*CHANNELS-1:0] key_words[0:`STEP_key_SIZE/CHANNELS-1];
    logic [8*VALUES-1:0] value_words[0:`STEP_value_SIZE/VALUES-1];
    logic [4:0] F_data[0:`STEP_F_SIZE-1];
    logic [31:0] wanted_O[0:BATCH*HEADS*QUERIES*VALUES-1];
    logic [30:0] wanted_l[0:BATCH*HEADS*QUERIES-1];
`ifdef STEP_A_FILE
    logic [31:0] multiplier_data[0:`STEP_R_of_scores_SIZE-1];
    logic [16:0] column_data[0:`STEP_A_SIZE-1];
`else
    logic [31:0] multiplier_data[0:`STEP_M_SIZE-1];
`endif
`ifdef IN_mask_FILE
    logic [`IN_mask_WIDTH-1:0] mask_data[0:`IN_mask_SIZE-1];
`endif
`ifdef STEP_F_F_FILE
    logic [3:0] drop_data[0:`STEP_F_F_SIZE-1];
`endif
`ifdef STEP_R_FILE
    logic [30:0] ratio_data[0:`STEP_R_SIZE-1];
    logic [4:0] ratio_shift_data[0:`STEP_e_11_SIZE-1];
    logic [7:0] wanted[0:BATCH*HEADS*QUERIES*VALUES-1];
`endif

    logic [16:0] keys = 17'(KEYS), column;
    logic exact = 1'(`CONST_exact_sum), biased = 1'b0, in_valid = 1'b0, in_ready, wants_value, shown, out_valid;
    logic [30:0] inverse_count = 31'(`CONST_inverse_count), multiplier, ratio, denominator;
    logic [5:0] drop;
    logic [4:0] fraction, ratio_shift;
    logic [8*CHANNELS-1:0] query, key;
    logic signed [31:0] bias, numerator;
    logic [8*VALUES-1:0] value;
    logic [INDEX-1:0] channel;
    logic signed [7:0] y;
    int values = 0, mismatches = 0, cycles = 0, row = 0;

    attention_row #(.CHANNELS(CHANNELS), .VALUES(VALUES), .KEYS(KEYS)) dut (.*);
    always #5 clk = ~clk;
    always @(posedge clk) cycles++;

    // where an element is in a tensor whose axes of size 1, or of a period, are repeated
    function automatic int at(int d0, int d1, int d2, int d3, int b, int h, int q, int c);
        return (((b % d0) * d1 + h % d1) * d2 + q % d2) * d3 + c % d3;
    endfunction

    task automatic present(int b, int h, int q, int j, logic of_value);
        if (of_value) begin
            value = value_words[at(`STEP_value_D0, `STEP_value_D1, KEYS, 1, b, h, j, 0)];
        end else begin
            key = key_words[at(`STEP_key_D0, `STEP_key_D1, KEYS, 1, b, h, j, 0)];
            shown = `PARAM_causal == 0 || j <= q;
`ifdef STEP_A_FILE
            column = column_data[at(`STEP_A_D0, `STEP_A_D1, 1, `STEP_A_D3, b, h, 0, j)];
`else
            column = 17'd1;
`endif
            bias = 32'sd0;
`ifdef IN_mask_FILE
            if (`IN_mask_WIDTH == 1)
                shown = shown && mask_data[at(`IN_mask_D0, `IN_mask_D1, `IN_mask_D2, `IN_mask_D3, b, h, q, j)][0];
            else bias = 32'(mask_data[at(`IN_mask_D0, `IN_mask_D1, `IN_mask_D2, `IN_mask_D3, b, h, q, j)]);
`endif
        end
    endtask

    task automatic send(int b, int h, int q, logic of_value);
        int j = 0;
        while (j < KEYS) begin
            in_valid = row % 2 == 0 || $urandom % 3 != 0;
            present(b, h, q, j, of_value);
            #1;
            if (in_valid && in_ready && wants_value == of_value) j++;
            @(negedge clk);
        end
        in_valid = 1'b0;
    endtask

    initial begin
        $readmemh(`STEP_query_FILE, query_data);
        $readmemh(`STEP_key_FILE, key_data);
        $readmemh(`STEP_value_FILE, value_data);
        for (int i = 0; i < `STEP_key_SIZE; i++) key_words[i/CHANNELS][8*(i%CHANNELS)+:8] = key_data[i];
        for (int i = 0; i < `STEP_value_SIZE; i++) value_words[i/VALUES][8*(i%VALUES)+:8] = value_data[i];
        $readmemh(`STEP_F_FILE, F_data);
        $readmemh(`NUMERATOR_FILE, wanted_O);
        $readmemh(`DENOMINATOR_FILE, wanted_l);
`ifdef STEP_A_FILE
        $readmemh(`STEP_R_of_scores_FILE, multiplier_data);
        $readmemh(`STEP_A_FILE, column_data);
`else
        $readmemh(`STEP_M_FILE, multiplier_data);
`endif
`ifdef IN_mask_FILE
        $readmemh(`IN_mask_FILE, mask_data);
        biased = `IN_mask_WIDTH == 32;
`endif
`ifdef STEP_F_F_FILE
        $readmemh(`STEP_F_F_FILE, drop_data);
`endif
`ifdef STEP_R_FILE
        $readmemh(`STEP_R_FILE, ratio_data);
        $readmemh(`STEP_e_11_FILE, ratio_shift_data);
        $readmemh(`STEP_out_FILE, wanted);
`endif
        @(negedge clk);
        @(negedge clk);
        reset = 1'b0;
        for (int b = 0; b < BATCH; b++) for (int h = 0; h < HEADS; h++) for (int q = 0; q < QUERIES; q++) begin
            for (int c = 0; c < CHANNELS; c++) query[8*c+:8] = query_data[at(BATCH, HEADS, QUERIES, CHANNELS, b, h, q, c)];
            fraction = F_data[at(`STEP_F_D0, `STEP_F_D1, `STEP_F_D2, `STEP_F_D3, b, h, q, 0)];
            drop = 6'd0;
`ifdef STEP_A_FILE
            drop = 6'd32;
            multiplier = 31'(multiplier_data[
                at(`STEP_R_of_scores_D0, `STEP_R_of_scores_D1, `STEP_R_of_scores_D2, `STEP_R_of_scores_D3, b, h, q, 0)]);
`else
            multiplier = 31'(multiplier_data[at(`STEP_M_D0, `STEP_M_D1, `STEP_M_D2, `STEP_M_D3, b, h, q, 0)]);
`endif
`ifdef STEP_F_F_FILE
            drop = 6'(drop_data[at(`STEP_F_F_D0, `STEP_F_F_D1, `STEP_F_F_D2, `STEP_F_F_D3, b, h, q, 0)]);
`endif
            send(b, h, q, 1'b0);
            while (!wants_value) @(negedge clk);
            send(b, h, q, 1'b1);
            for (int c = 0; c < VALUES; c++) begin
                ratio = 31'd0;
                ratio_shift = 5'd0;
`ifdef STEP_R_FILE
                ratio = ratio_data[at(`STEP_R_D0, `STEP_R_D1, `STEP_R_D2, `STEP_R_D3, b, h, 0, c)];
                ratio_shift = ratio_shift_data[at(`STEP_e_11_D0, `STEP_e_11_D1, `STEP_e_11_D2, `STEP_e_11_D3, b, h, 0, c)];
`endif
                for (int wait_for = 0; !out_valid && wait_for < 100; wait_for++) @(negedge clk);
                if (out_valid !== 1'b1 || numerator !== wanted_O[row*VALUES+c] || denominator !== wanted_l[row]) begin
                    mismatches++;
                    $display("O and l of row %0d, channel %0d: %0d, %0d, not %0d, %0d", row, c, numerator, denominator,
                             $signed(wanted_O[row*VALUES+c]), wanted_l[row]);
                end
`ifdef STEP_R_FILE
                if (y !== wanted[row*VALUES+c]) begin
                    mismatches++;
                    $display("y of row %0d, channel %0d: %0d, not %0d", row, c, y, $signed(wanted[row*VALUES+c]));
                end
`endif
                values++;
                @(negedge clk);
            end
            row++;
        end
        $display("%0d values, %0d mismatches, %0d cycles", values, mismatches, cycles - 2);
        $finish;
    end
endmodule
